//! Sends each request where it belongs: gRPC to its service, everything else to REST.

use std::{
    convert::Infallible,
    future::ready,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

#[cfg(feature = "push")]
use http::Method;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::body::Incoming;
use tonic::{Status, body::Body, codegen::BoxFuture, server::NamedService};
use tower::Service;

use crate::api::rest::{self, Rest, SetupError};

/// The eventual answer.
pub type Answer = BoxFuture<Response<Body>, Infallible>;

/// A gRPC service with its type forgotten.
trait Call: Send + Sync {
    fn call(&self, request: Request<Body>) -> Answer;
}

impl<S> Call for S
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    fn call(&self, request: Request<Body>) -> Answer {
        // Generated services are always ready, and their clones share everything.
        Box::pin(Service::call(&mut self.clone(), request))
    }
}

/// gRPC services by name.
#[derive(Default)]
pub struct Services {
    services: Vec<(&'static str, Box<dyn Call>)>,
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

    fn find(&self, name: &str) -> Option<&dyn Call> {
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
        let name = request.uri().path().trim_start_matches('/').split('/').next().unwrap_or_default();
        if let Some(service) = self.shared.early.find(name) {
            return service.call(request);
        }
        let Some(late) = self.shared.late.get() else {
            return grpc_status(Status::unavailable("The broker is not ready yet."));
        };
        match late.find(name) {
            Some(service) => service.call(request),
            None => grpc_status(Status::unimplemented(format!("Unknown service {name}."))),
        }
    }
}

/// Where requests go; cheap to clone.
#[derive(Clone)]
pub struct Dispatch {
    grpc: Grpc,
    rest: Rest<Grpc>,
}

impl Dispatch {
    /// Serves `early` at once and answers the rest with UNAVAILABLE until [`open`](Self::open).
    ///
    /// # Errors
    /// When the API's descriptors are faulty.
    pub fn new(early: Services) -> Result<Self, SetupError> {
        let grpc = Grpc {
            shared: Arc::new(Shared {
                early,
                late: OnceLock::new(),
                #[cfg(feature = "push")]
                issuer: OnceLock::new(),
            }),
        };
        Ok(Self { rest: rest::service(grpc.clone())?, grpc })
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
        #[cfg(feature = "push")]
        if crate::push::has_page(request.uri().path()) && [Method::GET, Method::HEAD].contains(request.method()) {
            return issuer_page(self.grpc.shared.issuer.get().cloned(), request.uri().path().to_owned());
        }
        if !is_grpc(request.headers().get(header::CONTENT_TYPE)) {
            return self.rest.clone().call(request.map(Body::new));
        }
        if request.version() != Version::HTTP_2 {
            // The end of a gRPC answer, its status, is a trailer, which HTTP/1 clients do not look for.
            let mut answer = Response::new(Body::new("gRPC needs HTTP/2.\n".to_owned()));
            *answer.status_mut() = StatusCode::HTTP_VERSION_NOT_SUPPORTED;
            return Box::pin(ready(Ok(answer)));
        }
        self.grpc.clone().call(request.map(Body::new))
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
