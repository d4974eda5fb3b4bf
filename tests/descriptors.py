"""Prints the interface of the official Python packages, one fact per line, in the form that tests/descriptors.txt has.

The facts are names, numbers, types, labels, oneofs, enum values, methods and HTTP bindings. The integration test compares
the file with the server's own descriptors, and with this script's output where the packages can be imported.

    python3 tests/descriptors.py > tests/descriptors.txt

Needs google-cloud-pubsub, which brings grpc-google-iam-v1 and googleapis-common-protos. Exits with 3 without them.
"""

import sys

try:
    import grpc
    from google.api import annotations_pb2, field_behavior_pb2, http_pb2
    from google.iam.v1 import iam_policy_pb2, options_pb2, policy_pb2
    from google.protobuf import empty_pb2
    from google.pubsub_v1.services.publisher.transports import grpc as publisher_grpc
    from google.pubsub_v1.services.publisher.transports import rest_base as publisher_rest
    from google.pubsub_v1.services.schema_service.transports import grpc as schema_grpc
    from google.pubsub_v1.services.schema_service.transports import rest_base as schema_rest
    from google.pubsub_v1.services.subscriber.transports import grpc as subscriber_grpc
    from google.pubsub_v1.services.subscriber.transports import rest_base as subscriber_rest
    from google.pubsub_v1.types import pubsub, schema
    from google.rpc import code_pb2, error_details_pb2, status_pb2
    from google.type import expr_pb2
except ImportError as missing:
    print(missing, file=sys.stderr)
    sys.exit(3)

SCALARS = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32", 8: "bool", 9: "string",
    12: "bytes", 13: "uint32", 15: "sfixed32", 16: "sfixed64", 17: "sint32", 18: "sint64",
}

FILES = [
    pubsub.Topic.pb().DESCRIPTOR.file,
    schema.Schema.pb().DESCRIPTOR.file,
    iam_policy_pb2.DESCRIPTOR,
    policy_pb2.DESCRIPTOR,
    options_pb2.DESCRIPTOR,
    expr_pb2.DESCRIPTOR,
    status_pb2.DESCRIPTOR,
    error_details_pb2.DESCRIPTOR,
    code_pb2.DESCRIPTOR,
    http_pb2.DESCRIPTOR,
    annotations_pb2.DESCRIPTOR,
    field_behavior_pb2.DESCRIPTOR,
]

SERVICES = [
    ("google.pubsub.v1.Publisher", publisher_grpc.PublisherGrpcTransport, publisher_rest._BasePublisherRestTransport),
    ("google.pubsub.v1.Subscriber", subscriber_grpc.SubscriberGrpcTransport, subscriber_rest._BaseSubscriberRestTransport),
    ("google.pubsub.v1.SchemaService", schema_grpc.SchemaServiceGrpcTransport, schema_rest._BaseSchemaServiceRestTransport),
]

IAM = "google.iam.v1.IAMPolicy"


def type_of(field):
    message = field.message_type
    if message is not None and message.GetOptions().HasField("map_entry"):
        key, value = (message.fields_by_name[name] for name in ("key", "value"))
        return f"map<{type_of(key)},{type_of(value)}>"
    named = message or field.enum_type
    text = named.full_name if named is not None else SCALARS[field.type]
    return f"repeated {text}" if field.is_repeated else text


def field_line(field):
    # Names that mean something in Python have an underscore added in the package.
    line = f"field {field.full_name.removesuffix('_')} = {field.number} {type_of(field)}"
    oneof = field.containing_oneof
    if oneof is None:
        return line
    # The compiler gives a proto3 optional field a oneof of its own, named after it.
    return f"{line} optional" if oneof.name == f"_{field.name}" else f"{line} oneof {oneof.name}"


def enum_lines(enum):
    yield f"enum {enum.full_name}"
    for value in enum.values:
        yield f"value {enum.full_name}.{value.name} = {value.number}"


def message_lines(message):
    if message.GetOptions().HasField("map_entry"):
        return
    yield f"message {message.full_name}"
    for field in message.fields:
        yield field_line(field)
    for enum in message.enum_types:
        yield from enum_lines(enum)
    for nested in message.nested_types:
        yield from message_lines(nested)


def file_lines(file):
    for message in file.message_types_by_name.values():
        yield from message_lines(message)
    for enum in file.enum_types_by_name.values():
        yield from enum_lines(enum)
    for extension in file.extensions_by_name.values():
        yield f"extension {extension.full_name} = {extension.number} {type_of(extension)}"


class Recorder(grpc.Channel):
    """A channel that notes which methods a generated transport asks for."""

    def __init__(self):
        self.methods = {}

    def note(self, streams):
        def stub(path, request_serializer=None, response_deserializer=None, *_, **__):
            self.methods[path] = (streams, request_serializer, response_deserializer)
            return lambda *_args, **_kwargs: None

        return stub

    def __getattribute__(self, name):
        streams = {"unary_unary": ("", ""), "stream_stream": ("stream ", "stream "), "unary_stream": ("", "stream "),
                   "stream_unary": ("stream ", "")}
        return self.note(streams[name]) if name in streams else super().__getattribute__(name)

    def subscribe(self, callback, try_to_connect=False): ...
    def unsubscribe(self, callback): ...
    def unary_unary(self, *_, **__): ...
    def unary_stream(self, *_, **__): ...
    def stream_unary(self, *_, **__): ...
    def stream_stream(self, *_, **__): ...
    def close(self): ...
    def __enter__(self): ...
    def __exit__(self, *_): ...


def message_name(function):
    """The message that a serializer or deserializer is for."""
    if function == empty_pb2.Empty.FromString:
        return "google.protobuf.Empty"
    return function.__self__.pb().DESCRIPTOR.full_name


def snake(name):
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def http_lines(path, options):
    for option in options:
        body = f" body={option['body']}" if option.get("body") else ""
        yield f"http {path} {option['method'].upper()} {option['uri']}{body}"


def service_lines(service, grpc_transport, rest_transport):
    yield f"service {service}"
    channel = Recorder()
    transport = grpc_transport(channel=channel)
    # The transport's own wrapper asks for a method only when it is called, and the stubs made so far use it.
    transport._logged_channel = channel
    transport._stubs = {}
    bases = [name for name in dir(rest_transport) if name.startswith("_Base")]
    for name in (base.removeprefix("_Base") for base in bases):
        options = getattr(rest_transport, f"_Base{name}")
        getattr(transport, snake(name))
        if name.endswith(("IamPolicy", "IamPermissions")):
            # The mixin has a service of its own; the bindings are those of Pub/Sub.
            if service.endswith("Publisher"):
                yield from http_lines(f"/{IAM}/{name}", options._get_http_options())
            continue
        path = f"/{service}/{name}"
        (sends, answers), serializer, deserializer = channel.methods[path]
        yield f"method {path} {sends}{message_name(serializer)} -> {answers}{message_name(deserializer)}"
        # Methods without a binding have no such function.
        if hasattr(options, "_get_http_options"):
            yield from http_lines(path, options._get_http_options())


def iam_lines():
    service = iam_policy_pb2.DESCRIPTOR.services_by_name["IAMPolicy"]
    yield f"service {service.full_name}"
    for method in service.methods:
        yield f"method /{service.full_name}/{method.name} {method.input_type.full_name} -> {method.output_type.full_name}"


def main():
    lines = set(iam_lines())
    for file in FILES:
        lines.update(file_lines(file))
    for service in SERVICES:
        lines.update(service_lines(*service))
    print("\n".join(sorted(lines)))


main()
