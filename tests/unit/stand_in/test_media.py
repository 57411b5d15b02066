"""Media that a stand-in accepts: what they are called is what it sees, and an encode worker tells another one that it has seen them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict
from grpclib.const import Status

from core.wire.generated import inference_pb2 as pb
from core.wire.generated import vllm
from plugins.stand_in.engine.call import Medium
from plugins.stand_in.engine.encoder import ECTransferConfig, Encoder
from plugins.stand_in.engine.prefix_cache import Namespace, PrefixCache
from tests.unit.stand_in.serving import over_asyncio, refusal, request, worker

#: The picture stands in the third block of 16.
PROMPT, OFFSET, LENGTH = list(range(1, 70)), 34, 4


def seeing(*identifiers: str, offset: int = OFFSET, length: int = LENGTH, tokens: int = 4) -> pb.GenerateRequest:
    message = request(prompt=PROMPT, tokens=tokens)
    for identifier in identifiers:
        features = pb.PreprocessedMediaFeatures(kwargs=b"", identifier=identifier, offset=offset, length=length)
        message.media.append(pb.MediaItem(modality=pb.MediaItem.IMAGE, features=features))
    return message


def config(folder: Path, role: str) -> ECTransferConfig:
    members = {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": {"shared_storage_path": str(folder)}}
    return msgspec.convert(members, ECTransferConfig)


@over_asyncio
async def test_another_picture_gives_other_tokens_and_shares_only_what_is_before_it():
    async with worker(enable_media=True) as stand_in:
        replies = [await stand_in.generate(seeing(name)) for name in ("red", "blue", "red")]
        first, second, again = (list(reply.outputs.token_ids) for reply in replies)
        assert first == again != second
        assert [reply.outputs.finish_info.num_cached_tokens for reply in replies] == [0, 32, 64]
        info = await stand_in.control.get_model_info(vllm.GetModelInfoRequest())
        assert info.supports_multimodal


def test_events_name_the_media_of_a_block_and_how_far_off_they_begin():
    cache, told = PrefixCache(16, 100), []
    cache.announce = told.extend
    cache.store(PROMPT[:64], Namespace(salt="7", media=(Medium("red", 14, 4), Medium("blue", 40, 8))))
    assert told[0]["extra_keys"] == [[["red", 14], "7"], [["red", -2]], [["blue", 8]], None]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (seeing(""), "media[0]: features.identifier must not be empty"),
        (seeing("red", length=0), "media[0]: features.offset and features.length must lie within the prompt"),
        (seeing("red", offset=66), "media[0]: features.offset and features.length must lie within the prompt"),
    ],
)
def test_media_that_are_wrong_are_refused(message: pb.GenerateRequest, why: str):
    async def refused() -> None:
        async with worker(enable_media=True) as stand_in:
            assert await refusal(stand_in.generate(message)) == (Status.INVALID_ARGUMENT, why)
            raw = request(prompt=PROMPT)
            raw.media.append(pb.MediaItem(modality=pb.MediaItem.IMAGE, raw_bytes=b"?"))
            assert (await refusal(stand_in.generate(raw)))[0] is Status.INVALID_ARGUMENT

    over_asyncio(refused)()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert all(len(file.name) == 32 for file in tmp_path.iterdir()), "no identifier is a path"


def test_an_encode_worker_makes_no_token_and_says_what_it_has_seen(folder: Path):
    async def told() -> None:
        async with worker(enable_media=True, ec_transfer=config(folder, "ec_producer")) as stand_in:
            outputs = (await stand_in.generate(seeing("red", "../blue"))).outputs
            assert (outputs.num_tokens, outputs.finish_info.finish_reason) == (0, pb.FinishInfo.STOP)
            items: dict[str, Any] = {"red": {"item_indices": [0], "metadata": {}}, "../blue": {"item_indices": [1], "metadata": {}}}
            assert MessageToDict(outputs.finish_info.ec_transfer_params) == items
            streamed = await stand_in.messages(seeing("red"))
            assert [message.HasField("prompt_info") for message in streamed] == [True, False]
            assert "red" in streamed[1].outputs.finish_info.ec_transfer_params

    over_asyncio(told)()
    assert len(list(folder.iterdir())) == 2


def test_who_goes_on_looks_only_at_what_nobody_has_seen(folder: Path):
    producer, consumer = Encoder(config(folder, "ec_producer")), Encoder(config(folder, "ec_consumer"))
    red, blue = Medium("red", 0, 4), Medium("blue", 8, 4)
    for _ in range(2):
        producer.see([red])
        consumer.see([red])
    assert (producer.looks, consumer.looks) == (1, 0)
    consumer.see([red, blue])
    assert consumer.looks == 1
    assert (producer.is_all, consumer.is_all) == (True, False)
    assert consumer.hand_over([red]) is None
    assert len(list(folder.iterdir())) == 1


def test_the_configuration_is_vllms():
    with pytest.raises(msgspec.ValidationError, match="ec_role"):
        config(Path("/tmp"), "producer")
