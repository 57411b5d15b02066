"""The account of what the suite puts on the wire.

A test names what it exercises with the mark `exercises`; all marks together are the coverage table. On the scripted worker each test is
held to its mark: an rpc must have been called, a field must have been set in a message that was sent, or have come back set.
`test_coverage.py` demands that every rpc and every field of proto/*.proto is in the table.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import betterproto2
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from core.wire.generated import inference_pb2, vllm
from core.wire.generated.grpc.health import v1 as health
from tests.conformance import over_grpc

exercises = pytest.mark.exercises

#: Fields that no message of ours can show set, and why not.
NEVER_SET = {
    "SequenceOutput.index": "always 0: there is one sequence",
    "ModelInfo.supports_multimodal": "false for the text-only model of these workers",
    "RlCapabilities.draft_weight_updates_enabled": "false without a speculative draft model",
    "ParallelismInfo.data_parallel_rank": "0: the rank of the first engine is told",
}


class Seen:
    """The rpcs that were called and the fields that were set, by their names without the package."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.kinds: set[str] = set()

    def call(self, path: str) -> None:
        """Note an rpc by its path."""
        service, rpc = path.removeprefix("/").split("/")
        self.names.add(f"{service.rpartition('.')[2]}.{rpc}")

    def message(self, message: Any) -> None:
        """Note what is set in a message, of either library, and in those inside."""
        if isinstance(message, Message):
            self._protobuf(message)
        elif isinstance(message, betterproto2.Message):
            self._betterproto(message)

    def _protobuf(self, message: Message) -> None:
        for field, value in message.ListFields():
            if field.full_name.startswith("vllm."):
                self.names.add(_name(field))
                if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                    for inner in [value] if isinstance(value, Message) else value:
                        self._protobuf(inner)

    def _betterproto(self, message: betterproto2.Message) -> None:
        for name in _names(type(message)):
            value = getattr(message, name)
            if value is not None and value != message._get_field_default(name):
                self.names.add(f"{type(message).__name__}.{name}")
            for inner in value if isinstance(value, list) else [value]:
                self.message(inner)


def contract() -> set[str]:
    """Every rpc and every field of proto/*.proto."""
    names: set[str] = set()
    for service, module in (("Control", vllm), ("Health", health)):
        stub = getattr(module, f"{service}Stub")
        names |= {f"{service}.{''.join(part.title() for part in rpc.split('_'))}" for rpc in vars(stub) if not rpc.startswith("_")}
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, betterproto2.Message):
                names |= {f"{kind.__name__}.{name}" for name in _names(kind)}
    for service in inference_pb2.DESCRIPTOR.services_by_name.values():
        names |= {f"{service.name}.{rpc.name}" for rpc in service.methods}
    for message in inference_pb2.DESCRIPTOR.message_types_by_name.values():
        names |= set(_fields(message))
    return names


def table() -> dict[str, set[str]]:
    """What the marks of the suite name → the tests that do so, as `module::test`."""
    found: dict[str, set[str]] = {}
    for info in pkgutil.iter_modules(over_grpc.__path__):
        if info.name.startswith("test_"):
            module = importlib.import_module(f"{over_grpc.__name__}.{info.name}")
            for test, function in vars(module).items():
                for mark in getattr(function, "pytestmark", ()) if test.startswith("test_") else ():
                    for name in mark.args if mark.name == exercises.name else ():
                        found.setdefault(name, set()).add(f"{info.name}::{test}")
    return found


def _fields(message: Descriptor) -> Iterator[str]:
    if not message.GetOptions().map_entry:
        for field in message.fields:
            yield _name(field)
        for inner in message.nested_types:
            yield from _fields(inner)


def _names(kind: type[betterproto2.Message]) -> list[str]:
    assert dataclasses.is_dataclass(kind)
    return [field.name for field in dataclasses.fields(kind)]


def _name(field: FieldDescriptor) -> str:
    return field.full_name.removeprefix("vllm.")
