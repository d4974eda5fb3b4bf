//! Pull, StreamingPull, Acknowledge and ModifyAckDeadline.

use std::{pin::Pin, sync::Arc};

use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use crate::{api::proto::pubsub as pb, connector::Connector};

/// The responses of one StreamingPull call.
pub type StreamingPullStream = Pin<Box<dyn Stream<Item = Result<pb::StreamingPullResponse, Status>> + Send>>;

fn not_yet() -> Status {
    Status::unimplemented("delivery is not built yet")
}

pub async fn pull(_: &Arc<Connector>, _: Request<pb::PullRequest>) -> Result<Response<pb::PullResponse>, Status> {
    Err(not_yet())
}

pub async fn acknowledge(_: &Arc<Connector>, _: Request<pb::AcknowledgeRequest>) -> Result<Response<()>, Status> {
    Err(not_yet())
}

pub async fn modify_ack_deadline(_: &Arc<Connector>, _: Request<pb::ModifyAckDeadlineRequest>) -> Result<Response<()>, Status> {
    Err(not_yet())
}

pub async fn streaming_pull(
    _: &Arc<Connector>,
    _: Request<Streaming<pb::StreamingPullRequest>>,
) -> Result<Response<StreamingPullStream>, Status> {
    Err(not_yet())
}
