//! `landline.v1.MessageTransforms`: the methods on message transforms that only the API's REST interface has.

use std::sync::Arc;

use tonic::{Code, Request, Response, Status, async_trait};

use super::gate::Gate;
use crate::{
    api::{
        convert,
        proto::{
            landline::{
                self as pb, message_transforms_server, test_message_transforms_request::Transforms,
                transformed_message::Result as Outcome,
            },
            pubsub::PubsubMessage,
            rpc,
        },
        status::to_status,
    },
    connector::{
        Connector, Error,
        transforms::{TrialOf, Tried},
    },
    model::EncodedMessage,
};

/// The service.
pub struct MessageTransformsService {
    connector: Arc<Connector>,
    gate: Gate,
}

impl MessageTransformsService {
    pub fn new(connector: Arc<Connector>, gate: Gate) -> Self {
        Self { connector, gate }
    }
}

#[async_trait]
impl message_transforms_server::MessageTransforms for MessageTransformsService {
    async fn validate_message_transform(
        &self,
        request: Request<pb::ValidateMessageTransformRequest>,
    ) -> Result<Response<()>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::ValidateMessageTransformRequest { project, message_transform } = request.into_inner();
        let draft = convert::transform_draft(message_transform.unwrap_or_default());
        self.connector.validate_transform(&project, &draft).await.map_err(to_status)?;
        Ok(Response::new(()))
    }

    async fn test_message_transforms(
        &self,
        request: Request<pb::TestMessageTransformsRequest>,
    ) -> Result<Response<pb::TestMessageTransformsResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::TestMessageTransformsRequest { project, message, transforms } = request.into_inner();
        let of = match transforms {
            Some(Transforms::Topic(name)) => TrialOf::Topic(convert::name(&name)?),
            Some(Transforms::Subscription(name)) => TrialOf::Subscription(convert::name(&name)?),
            Some(Transforms::MessageTransforms(list)) => {
                TrialOf::Transforms(list.message_transforms.into_iter().map(convert::transform_draft).collect())
            }
            None => {
                let why = "message_transforms, topic or subscription must be set";
                return Err(to_status(Error::argument("transforms", why)));
            }
        };
        let message = message.unwrap_or_default();
        let attributes = message.attributes.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let encoded = EncodedMessage::encode(&message.data, attributes, &message.ordering_key);
        let id = Some(message.message_id).filter(|id| !id.is_empty());
        let tried = self.connector.try_transforms(&project, of, encoded, id).await.map_err(to_status)?;
        let transformed_messages = tried.into_iter().map(transformed).collect();
        Ok(Response::new(pb::TestMessageTransformsResponse { transformed_messages }))
    }
}

fn transformed(tried: Tried) -> pb::TransformedMessage {
    let result = match tried {
        Tried::Transformed(message) => Outcome::TransformedMessage(PubsubMessage {
            data: message.data().to_vec().into(),
            attributes: message.attribute_map(),
            ordering_key: message.ordering_key().to_owned(),
            ..PubsubMessage::default()
        }),
        Tried::Filtered => Outcome::FilteredMessage(pb::FilteredMessage {}),
        Tried::Failed(message) => Outcome::FailedMessage(pb::FailedMessage {
            error: Some(rpc::Status { code: Code::InvalidArgument as i32, message, details: Vec::new() }),
        }),
    };
    pb::TransformedMessage { result: Some(result) }
}
