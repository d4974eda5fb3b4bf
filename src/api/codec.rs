//! The codec of the generated services: prost with buffers fit for this server.

use std::marker::PhantomData;

use prost::Message;
use tonic::{
    Code, Status,
    codec::{BufferSettings, DecodeBuf, EncodeBuf},
};

use super::status::with_details;

/// First size of a call's buffers. Most requests and responses are smaller, larger ones grow theirs, and an idle stream
/// keeps two of these.
const BUFFER_BYTES: usize = 512;

/// A response leaves the encoder as soon as it is complete, so that asking for the next one tells that it was handed on.
const YIELD_BYTES: usize = 1;

fn settings() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, YIELD_BYTES)
}

/// Encodes `T` and decodes `U`.
#[derive(Debug, Clone)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = Encoder<T>;
    type Decoder = Decoder<U>;

    fn encoder(&mut self) -> Encoder<T> {
        Encoder(PhantomData)
    }

    fn decoder(&mut self) -> Decoder<U> {
        Decoder(PhantomData)
    }
}

/// Encodes into a buffer that grows once.
#[derive(Debug, Clone)]
pub struct Encoder<T>(PhantomData<T>);

impl<T: Message> tonic::codec::Encoder for Encoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(item.encoded_len());
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}

/// Decodes what is legal. Everything else is the sender's fault: INTERNAL would have clients send it again.
#[derive(Debug, Clone)]
pub struct Decoder<U>(PhantomData<U>);

impl<U: Message + Default> tonic::codec::Decoder for Decoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let decoded = U::decode(buffer).map(Some);
        decoded.map_err(|error| with_details(Code::InvalidArgument, format!("The message can't be read: {error}.")))
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}
