//! Errors of the REST surface: how they are made, and the JSON they become.

use http::StatusCode;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::api::proto::rpc;

/// Type URLs of details begin with this.
const TYPE_PREFIX: &str = "type.googleapis.com/";

/// INVALID_ARGUMENT that names the bad fields in its details. The message is the descriptions, one per line.
pub fn bad_request(violations: Vec<rpc::bad_request::FieldViolation>) -> Status {
    let message = violations.iter().map(|violation| violation.description.as_str()).collect::<Vec<_>>().join("\n");
    let detail = rpc::BadRequest { field_violations: violations };
    let detail = prost_types::Any { type_url: format!("{TYPE_PREFIX}google.rpc.BadRequest"), value: detail.encode_to_vec() };
    let code = Code::InvalidArgument;
    let details = rpc::Status { code: code as i32, message: message.clone(), details: vec![detail] };
    Status::with_details(code, message, details.encode_to_vec().into())
}

/// The HTTP status of a gRPC code, as in the comments of google/rpc/code.proto.
pub fn http_status(code: Code) -> StatusCode {
    let number = match code {
        Code::Ok => 200,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => 400,
        Code::Unauthenticated => 401,
        Code::PermissionDenied => 403,
        Code::NotFound => 404,
        Code::AlreadyExists | Code::Aborted => 409,
        Code::ResourceExhausted => 429,
        Code::Cancelled => 499,
        Code::Unknown | Code::Internal | Code::DataLoss => 500,
        Code::Unimplemented => 501,
        Code::Unavailable => 503,
        Code::DeadlineExceeded => 504,
    };
    StatusCode::from_u16(number).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// The name of a gRPC code.
fn code_name(code: Code) -> &'static str {
    rpc::Code::try_from(code as i32).unwrap_or(rpc::Code::Unknown).as_str_name()
}

/// `{"error":{"code":404,"message":"...","status":"NOT_FOUND","details":[...]}}`, without details if there are none.
pub fn envelope(pool: &DescriptorPool, status: &Status) -> Value {
    let details = rpc::Status::decode(status.details()).map(|inner| inner.details).unwrap_or_default();
    let details: Vec<Value> = details.iter().map(|detail| detail_json(pool, detail)).collect();
    let mut error = json!({
        "code": http_status(status.code()).as_u16(),
        "message": status.message(),
        "status": code_name(status.code()),
    });
    if !details.is_empty() {
        error["details"] = Value::Array(details);
    }
    json!({ "error": error })
}

/// A detail in the JSON form of `google.protobuf.Any`. One of unknown type keeps its bytes, in base64.
fn detail_json(pool: &DescriptorPool, detail: &prost_types::Any) -> Value {
    let name = detail.type_url.rsplit('/').next().unwrap_or_default();
    let message = pool
        .get_message_by_name(name)
        .and_then(|descriptor| DynamicMessage::decode(descriptor, detail.value.as_slice()).ok())
        .and_then(|message| serde_json::to_value(message).ok());
    match message {
        Some(Value::Object(mut fields)) => {
            fields.insert("@type".into(), detail.type_url.as_str().into());
            Value::Object(fields)
        }
        // Well-known types whose JSON is not an object.
        Some(value) => json!({ "@type": detail.type_url, "value": value }),
        None => {
            use base64::{Engine, engine::general_purpose::STANDARD};
            json!({ "@type": detail.type_url, "value": STANDARD.encode(&detail.value) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{proto::FILE_DESCRIPTOR_SET, status::with_error_info};

    fn shown(status: &Status) -> Value {
        envelope(&DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap(), status)
    }

    #[test]
    fn a_status_without_details_is_three_fields() {
        let expected = json!({"error": {"code": 404, "message": "Resource not found (resource=t).", "status": "NOT_FOUND"}});
        assert_eq!(shown(&Status::not_found("Resource not found (resource=t).")), expected);
    }

    #[test]
    fn details_are_decoded() {
        let info = rpc::ErrorInfo {
            reason: "R".into(),
            domain: "pubsub.googleapis.com".into(),
            metadata: [("id".to_owned(), "PERMANENT_FAILURE_INVALID_ACK_ID".to_owned())].into(),
        };
        let shown = shown(&with_error_info(Code::FailedPrecondition, "m".into(), info));
        assert_eq!(shown["error"]["code"], 400);
        assert_eq!(shown["error"]["status"], "FAILED_PRECONDITION");
        assert_eq!(
            shown["error"]["details"],
            json!([{
                "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "reason": "R",
                "domain": "pubsub.googleapis.com",
                "metadata": {"id": "PERMANENT_FAILURE_INVALID_ACK_ID"},
            }])
        );
    }

    #[test]
    fn a_detail_of_unknown_type_keeps_its_bytes() {
        let detail = prost_types::Any { type_url: "type.googleapis.com/x.Y".into(), value: vec![1, 2] };
        let details = rpc::Status { code: 3, message: "m".into(), details: vec![detail] };
        let shown = shown(&Status::with_details(Code::InvalidArgument, "m", details.encode_to_vec().into()));
        assert_eq!(shown["error"]["details"], json!([{"@type": "type.googleapis.com/x.Y", "value": "AQI="}]));
    }

    #[test]
    fn every_code_has_the_http_status_of_the_api() {
        let expected = [200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401];
        let found: Vec<u16> = (0..17).map(|code| http_status(Code::from(code)).as_u16()).collect();
        assert_eq!(found, expected);
        assert_eq!(code_name(Code::Cancelled), "CANCELLED");
    }
}
