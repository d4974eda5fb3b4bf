//! Sends each request where it belongs: gRPC to its service, everything else to REST.

use std::{
    convert::Infallible,
    future::ready,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use hyper::body::Incoming;
use tonic::{Status, body::Body, codegen::BoxFuture, server::NamedService};
use tower::{Layer, Service, service_fn};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::{
    admin::{Call, Requests},
    api::{
        rest::{self, Rest, SetupError},
        status,
    },
    app::{
        body::{Budget, Counted},
        connection::HEADER_LIST_BYTES,
        exchange,
    },
    auth::{Authenticator, CallerRef, Invalid, Mode, Peer},
    model::text::clipped,
    telemetry,
};

/// The eventual answer.
pub type Answer = BoxFuture<Response<Body>, Infallible>;

/// A gRPC service with its type forgotten.
trait Serve: Send + Sync {
    fn run(&self, request: Request<Body>, counted: Call) -> Answer;
}

impl<S> Serve for S
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    fn run(&self, request: Request<Body>, counted: Call) -> Answer {
        // Generated services are always ready, and their clones share everything.
        let answer = Service::call(&mut self.clone(), request);
        Box::pin(async move {
            let answer = answer.await?;
            // An answer that begins with a status has nothing else; all others begin well.
            counted.answer(answer.headers().get("grpc-status").map(HeaderValue::as_bytes));
            Ok(answer)
        })
    }
}

/// gRPC services by name.
#[derive(Default)]
pub struct Services {
    services: Vec<(&'static str, Box<dyn Serve>)>,
}

impl Services {
    /// Adds a generated service.
    pub fn with<S>(mut self, service: S) -> Self
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
        S: NamedService,
        S::Future: Send + 'static,
    {
        self.services.push((S::NAME, Box::new(service)));
        self
    }

    fn find(&self, name: &str) -> Option<&dyn Serve> {
        // A handful of names: looking at each beats hashing.
        self.services.iter().find(|(known, _)| *known == name).map(|(_, service)| &**service)
    }
}

/// All gRPC services; cheap to clone.
#[derive(Clone)]
struct Grpc {
    shared: Arc<Shared>,
}

struct Shared {
    /// Services that answer from the start.
    early: Services,
    requests: Arc<Requests>,
    /// Whether anybody wants to know what calls are a part of.
    traced: bool,
    /// Services that need the broker, once it is there.
    late: OnceLock<Services>,
    /// The issuer of push tokens, whose documents everybody may read.
    #[cfg(feature = "push")]
    issuer: OnceLock<Arc<crate::push::Issuer>>,
}

impl Service<Request<Body>> for Grpc {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Answer {
        let parent = if self.shared.traced { trace_parent(&request) } else { None };
        let answer = self.route(request);
        match parent {
            None => answer,
            parent => Box::pin(telemetry::under(parent, answer)),
        }
    }
}

/// What the caller says its call is a part of.
fn trace_parent(request: &Request<Body>) -> Option<telemetry::Context> {
    telemetry::Context::parse(request.headers().get("traceparent")?.to_str().ok()?)
}

impl Grpc {
    fn route(&self, request: Request<Body>) -> Answer {
        let name = service_name(request.uri().path());
        let counted = self.shared.requests.begin(request.uri().path());
        if let Some(service) = self.shared.early.find(name) {
            return service.run(request, counted);
        }
        let Some(late) = self.shared.late.get() else {
            counted.answer(Some(b"14"));
            return grpc_status(Status::unavailable("The broker is not ready yet."));
        };
        match late.find(name) {
            Some(service) => service.run(request, counted),
            None => grpc_status(Status::unimplemented(format!("Unknown service {}.", clipped(name)))),
        }
    }
}

/// The only method whose requests are a stream.
const STREAMING_PULL: &str = "/google.pubsub.v1.Subscriber/StreamingPull";

/// REST over some services, for calls from within the process: nobody is asked who calls.
///
/// # Errors
/// When the API's descriptors are faulty.
pub fn within(
    services: Services,
) -> Result<impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future = Answer> + Clone, SetupError> {
    let shared = Shared {
        early: services,
        late: OnceLock::new(),
        requests: Arc::default(),
        traced: false,
        #[cfg(feature = "push")]
        issuer: OnceLock::new(),
    };
    rest::service(Grpc { shared: Arc::new(shared) })
}

/// Where requests go; cheap to clone.
#[derive(Clone)]
pub struct Dispatch {
    grpc: Grpc,
    rest: Rest<Grpc>,
    authenticator: Arc<Authenticator>,
    budget: Budget,
    peer: Arc<Peer>,
    /// Says which pages browsers may let call; none for only those of this server itself.
    cors: Option<CorsLayer>,
}

impl Dispatch {
    /// Serves `early` at once, counts every call in `requests`, and answers the rest with UNAVAILABLE until [`open`](Self::open).
    /// Browsers let pages of these origins call REST: `*` alone stands for all.
    /// Where calls are `traced`, what their callers say of that is listened to.
    ///
    /// # Errors
    /// When the API's descriptors are faulty.
    pub fn new(
        early: Services,
        authenticator: Arc<Authenticator>,
        requests: Arc<Requests>,
        cors_origins: &[String],
        traced: bool,
    ) -> Result<Self, SetupError> {
        let grpc = Grpc {
            shared: Arc::new(Shared {
                early,
                requests,
                traced,
                late: OnceLock::new(),
                #[cfg(feature = "push")]
                issuer: OnceLock::new(),
            }),
        };
        let rest = rest::service(grpc.clone())?;
        let cors = cors(cors_origins);
        Ok(Self { rest, grpc, authenticator, budget: Budget::default(), peer: Arc::default(), cors })
    }

    /// The same for the requests of one connection.
    pub fn for_peer(&self, peer: Peer) -> Self {
        Self { peer: Arc::new(peer), ..self.clone() }
    }

    /// From now on the documents of this issuer are served.
    #[cfg(feature = "push")]
    pub fn publish(&self, issuer: Arc<crate::push::Issuer>) {
        let _ = self.grpc.shared.issuer.set(issuer);
    }

    /// From now on everything is served.
    pub fn open(&self, late: Services) {
        let _ = self.grpc.shared.late.set(late);
    }
}

impl hyper::service::Service<Request<Incoming>> for Dispatch {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn call(&self, request: Request<Incoming>) -> Answer {
        let Some(cors) = &self.cors else { return self.route(request) };
        let dispatch = self.clone();
        // Questions of browsers are answered here, before anybody is asked who calls: they come without credentials.
        Box::pin(cors.layer(service_fn(move |request| dispatch.route(request))).call(request))
    }
}

/// How long a browser may remember what it may do; browsers cut longer times.
const CORS_MAX_AGE: Duration = Duration::from_secs(3600);

/// What browsers are told. Cookies are not spoken of: there are none, and tokens go into a header that is listed.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    let origin = match origins {
        [] => return None,
        [all] if all == "*" => AllowOrigin::any(),
        some => AllowOrigin::list(some.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())),
    };
    let methods = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
    let layer = CorsLayer::new().allow_origin(origin).allow_methods(AllowMethods::list(methods));
    Some(layer.allow_headers(AllowHeaders::mirror_request()).max_age(CORS_MAX_AGE))
}

impl Dispatch {
    fn route(&self, request: Request<Incoming>) -> Answer {
        // Over HTTP/2 the connection itself sees to it.
        if request.version() != Version::HTTP_2 && header_bytes(request.headers()) > HEADER_LIST_BYTES as usize {
            return plain(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "The headers of the request are too large.\n");
        }
        #[cfg(feature = "push")]
        if crate::push::has_page(request.uri().path()) && [Method::GET, Method::HEAD].contains(request.method()) {
            return issuer_page(self.grpc.shared.issuer.get().cloned(), request.uri().path().to_owned());
        }
        let grpc = is_grpc(request.headers().get(header::CONTENT_TYPE));
        if !grpc && request.uri().path() == exchange::PATH {
            return Box::pin(exchange::answer(self.authenticator.clone(), request));
        }
        if grpc && request.version() != Version::HTTP_2 {
            // The end of a gRPC answer, its status, is a trailer, which HTTP/1 clients do not look for.
            return plain(StatusCode::HTTP_VERSION_NOT_SUPPORTED, "gRPC needs HTTP/2.\n");
        }
        // What a stream sends is taken as it comes, for as long as the stream lives; all other requests are collected.
        let streams = grpc && request.uri().path() == STREAMING_PULL;
        let mut request = request.map(|body| if streams { Body::new(body) } else { Body::new(Counted::new(body, &self.budget)) });
        if self.authenticator.mode() == Mode::Off || self.is_for_everyone(grpc, &request) {
            return self.forward(grpc, request);
        }
        let authorization = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        if let Some(caller) = self.authenticator.known(authorization, &self.peer) {
            request.extensions_mut().insert(CallerRef(caller));
            return self.forward(grpc, request);
        }
        let dispatch = self.clone();
        Box::pin(async move { dispatch.authenticate(grpc, request).await })
    }
}

/// A document of the issuer of push tokens.
#[cfg(feature = "push")]
fn issuer_page(issuer: Option<Arc<crate::push::Issuer>>, path: String) -> Answer {
    Box::pin(async move {
        let page = match issuer {
            Some(issuer) => issuer.page(&path).await.map_err(|error| error.to_string()),
            None => Err("The broker is not ready yet.".to_owned()),
        };
        let (status, body, cache) = match page {
            Ok(page) => (StatusCode::OK, page.body, format!("public, max-age={}", page.max_age_seconds)),
            Err(text) => (StatusCode::SERVICE_UNAVAILABLE, format!("{text}\n"), "no-store".to_owned()),
        };
        let kind = if status == StatusCode::OK { "application/json; charset=UTF-8" } else { "text/plain; charset=utf-8" };
        let mut answer = Response::new(Body::new(body));
        *answer.status_mut() = status;
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        if let Ok(cache) = HeaderValue::try_from(cache) {
            answer.headers_mut().insert(header::CACHE_CONTROL, cache);
        }
        Ok(answer)
    })
}

impl Dispatch {
    fn forward(&self, grpc: bool, request: Request<Body>) -> Answer {
        if grpc { self.grpc.clone().call(request) } else { self.rest.clone().call(request) }
    }

    /// True for what probes and tools ask before they are anyone: health, reflection and the root.
    fn is_for_everyone(&self, grpc: bool, request: &Request<Body>) -> bool {
        let path = request.uri().path();
        if grpc { self.grpc.shared.early.find(service_name(path)).is_some() } else { path == "/" }
    }

    /// Finds out who sent a request before its body is read, and refuses it if that fails.
    async fn authenticate(&self, grpc: bool, mut request: Request<Body>) -> Result<Response<Body>, Infallible> {
        let authorization = request.headers().get(header::AUTHORIZATION).cloned();
        match self.authenticator.authenticate(authorization.as_ref().map(HeaderValue::as_bytes), &self.peer).await {
            Ok(caller) => {
                request.extensions_mut().insert(CallerRef(caller));
                self.forward(grpc, request).await
            }
            Err(reason) if grpc => Ok(status::unauthenticated(reason).into_http()),
            Err(reason) => {
                let mut answer = self.rest.refuse(&status::unauthenticated(reason), request.uri(), request.headers());
                if reason != Invalid::Provider {
                    answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"landline\""));
                }
                Ok(answer)
            }
        }
    }
}

/// The service in the path of a gRPC request.
fn service_name(path: &str) -> &str {
    path.trim_start_matches('/').split('/').next().unwrap_or_default()
}

/// True for `application/grpc`, with a `+format` or parameters, but not for `application/grpc-web`, which is another
/// protocol.
fn is_grpc(content_type: Option<&HeaderValue>) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    content_type.map(HeaderValue::as_bytes).is_some_and(|value| {
        value.len() >= GRPC.len()
            && value[..GRPC.len()].eq_ignore_ascii_case(GRPC)
            && matches!(value.get(GRPC.len()), None | Some(b'+' | b';' | b' '))
    })
}

/// The size of headers as HTTP/2 counts it.
fn header_bytes(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum()
}

/// An answer for people.
fn plain(status: StatusCode, text: &'static str) -> Answer {
    let mut answer = Response::new(Body::new(text.to_owned()));
    *answer.status_mut() = status;
    Box::pin(ready(Ok(answer)))
}

fn grpc_status(status: Status) -> Answer {
    Box::pin(ready(Ok(status.into_http())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_is_told_from_its_relatives() {
        for (content_type, expected) in [
            (Some("application/grpc"), true),
            (Some("application/grpc+proto"), true),
            (Some("application/grpc;charset=utf-8"), true),
            (Some("Application/GRPC"), true),
            (Some("application/grpc-web"), false),
            (Some("application/grpc-web+proto"), false),
            (Some("application/json"), false),
            (Some("application/gr"), false),
            (None, false),
        ] {
            let value = content_type.map(HeaderValue::from_static);
            assert_eq!(is_grpc(value.as_ref()), expected, "{content_type:?}");
        }
    }
}
