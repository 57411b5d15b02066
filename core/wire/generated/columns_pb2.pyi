from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reply(_message.Message):
    __slots__ = ("outputs",)
    class Outputs(_message.Message):
        __slots__ = ("candidate_tokens",)
        CANDIDATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
        candidate_tokens: _containers.RepeatedScalarFieldContainer[bytes]
        def __init__(self, candidate_tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: Reply.Outputs
    def __init__(self, outputs: _Optional[_Union[Reply.Outputs, _Mapping]] = ...) -> None: ...

class Columns(_message.Message):
    __slots__ = ("id", "logprob", "rank")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    id: _containers.RepeatedScalarFieldContainer[int]
    logprob: _containers.RepeatedScalarFieldContainer[float]
    rank: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Iterable[int]] = ..., logprob: _Optional[_Iterable[float]] = ..., rank: _Optional[_Iterable[int]] = ...) -> None: ...
