"""Event files of TensorBoard."""

from tensorboardX.proto import event_pb2


def events(data: bytes):
    """Yield the events of a TFRecord file: the length, its checksum, the event, its checksum."""
    while data:
        length = int.from_bytes(data[:8], "little")
        assert len(data) >= 16 + length, "the file is incomplete"
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
