"""Media in a request, on models that read only text: refused, for the first thing that is wrong."""

import pytest

from core.wire import Status
from tests.conformance.over_grpc.client import refusal, request
from tests.conformance.over_grpc.coverage import exercises

# A MessagePack map with one field: an integer, shared by one item.
KWARGS = r"\x81\xa1x\x82\xa4data\x07\xa5field\x92\xa6shared\x82\xaabatch_size\x01\xabkeep_on_cpu\xc2"
FEATURES = f'identifier: "i" mm_hash: "h" offset: 1 length: 2 is_embed: [true, false] kwargs: "{KWARGS}"'


@exercises("GenerateRequest.media", "MediaItem.modality", "MediaItem.url", "MediaItem.mime_type", "MediaItem.uuid")
async def test_an_image_by_its_address_is_refused(client):
    item = 'modality: IMAGE url: "http://127.0.0.1:1/a.png" mime_type: "image/png" uuid: "u"'
    assert (await refusal(client.generate(request(f"media {{ {item} }}"))))[0] is Status.INVALID_ARGUMENT


@exercises("MediaItem.data_uri")
async def test_an_image_in_its_address_is_refused(client):
    item = 'modality: IMAGE data_uri: "data:image/png;base64,AAAA"'
    assert (await refusal(client.generate(request(f"media {{ {item} }}"))))[0] is Status.INVALID_ARGUMENT


@exercises("MediaItem.raw_bytes")
async def test_an_image_as_bytes_is_refused(client):
    item = r'modality: IMAGE raw_bytes: "\x89PNG"'
    assert (await refusal(client.generate(request(f"media {{ {item} }}"))))[0] is Status.INVALID_ARGUMENT


@exercises("MediaItem.features", "PreprocessedMediaFeatures.kwargs", "PreprocessedMediaFeatures.identifier")
@exercises("PreprocessedMediaFeatures.offset", "PreprocessedMediaFeatures.length", "PreprocessedMediaFeatures.mm_hash")
@exercises("PreprocessedMediaFeatures.is_embed")
async def test_preprocessed_features_are_refused(client):
    status, message = await refusal(client.generate(request(f"media {{ modality: IMAGE features {{ {FEATURES} }} }}")))
    assert (status, bool(message)) == (Status.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("item", ["", "modality: IMAGE", "modality: VIDEO features { }", 'modality: AUDIO features { identifier: "i" }'])
async def test_incomplete_items_are_refused(client, item):
    assert (await refusal(client.generate(request(f"media {{ {item} }}"))))[0] is Status.INVALID_ARGUMENT
