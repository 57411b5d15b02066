"""What hashes stand for: bounded, and forgetting what was used least recently."""

from plugins.mm_features.contents import Content, Contents
from plugins.mm_features.features import digest_of


def content(fill: str, size: int = 10) -> Content:
    return Content(digest_of("image", fill.encode() * size), fill.encode() * size)


def with_contents(*names: str, max_names: int = 100, max_bytes: int = 100) -> Contents:
    contents = Contents(max_names=max_names, max_bytes=max_bytes)
    for name in names:
        contents.remember("image", name, content(name).digest)
        contents.keep(content(name))
    return contents


def test_a_name_is_per_modality():
    contents = with_contents("a")
    assert contents.find("image", "a") == content("a")
    assert contents.find("video", "a") is None
    assert contents.digest_of("video", "a") is None


def test_the_name_used_least_recently_is_forgotten_first():
    contents = with_contents("a", "b", max_names=2)
    contents.remember("image", "a", content("a").digest)
    contents.remember("image", "c", content("c").digest)
    assert [contents.digest_of("image", name) is None for name in "abc"] == [False, True, False]


def test_the_content_used_least_recently_goes_first():
    contents = with_contents("a", "b", max_bytes=20)
    contents.find("image", "a")
    contents.remember("image", "c", content("c").digest)
    contents.keep(content("c"))
    assert [contents.find("image", name) is None for name in "abc"] == [False, True, False]


def test_what_is_too_large_alone_pushes_nothing_out():
    contents = with_contents("a", max_bytes=20)
    contents.keep(content("b", size=21))
    assert contents.find("image", "a") == content("a")


def test_equal_content_is_kept_once():
    contents = with_contents("a", max_bytes=20)
    for name in ("x", "y", "z"):
        contents.remember("image", name, content("a").digest)
        contents.keep(content("a"))
    contents.remember("image", "b", content("b").digest)
    contents.keep(content("b"))
    assert contents.find("image", "x") == contents.find("image", "z") == content("a")
    assert contents.find("image", "b") == content("b")


def test_a_digest_binds_modality_and_content():
    digests = {digest_of("image", b"ab"), digest_of("audio", b"ab"), digest_of("image", b"b"), digest_of("imagea", b"b")}
    assert len(digests) == 4
