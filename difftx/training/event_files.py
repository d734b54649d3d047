"""The parts of tensorboardX that write TensorBoard's event files, imported without clients of buckets.

tensorboardX imports boto3 and google.cloud.storage if they are installed, so that it can write to buckets. That takes
two seconds of each command. difftx does not use them: it uploads the event files with `difftx.storage`.
"""

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules
_CLIENTS = {"boto3", "google.cloud.storage"} - _modules.keys()
_modules.update(dict.fromkeys(_CLIENTS))  # Importing a module raises ImportError if its entry is None.
try:
    from tensorboardX.event_file_writer import EventsWriter, directory_check
    from tensorboardX.proto import event_pb2, summary_pb2
finally:
    for _name in _CLIENTS:
        del _modules[_name]

__all__ = ["EventsWriter", "directory_check", "event_pb2", "summary_pb2"]
