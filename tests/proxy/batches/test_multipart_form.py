"""Multipart forms, valid and malformed."""

from __future__ import annotations

import httpx
import pytest

from proxy.batches.multipart_form import MAX_PARTS, FormError, FormField, read_form


def test_form_of_the_official_client() -> None:
    content = b"\r\n--not the boundary\r\n\x00\xff\r\n"
    sent = httpx.Request(
        "POST", "http://x", data={"purpose": "batch"}, files={"file": ('a "b".jsonl', content)}
    )
    parts = read_form(sent.read(), sent.headers["content-type"].encode())
    assert parts["purpose"] == FormField(b"batch")
    assert parts["file"].value == content
    assert parts["file"].file_name in ('a "b".jsonl', "a %22b%22.jsonl")


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


def field(name: bytes, value: bytes) -> bytes:
    return b'content-disposition: form-data; name="%b"\r\n\r\n%b' % (name, value)


KIND = b"multipart/form-data; boundary=b"


@pytest.mark.parametrize("kind", [KIND, b'Multipart/Form-Data; boundary="b"', KIND + b"; x=y"])
def test_boundary_parameter_is_parsed(kind: bytes) -> None:
    assert read_form(form(field(b"x", b"1"), field(b"y", b"")), kind) == {
        "x": FormField(b"1"),
        "y": FormField(b""),
    }


def test_preamble_is_skipped() -> None:
    body = b"preamble\r\n" + form(field(b"x", b"1"))
    assert read_form(body, KIND) == {"x": FormField(b"1")}


def test_long_part_header_is_named() -> None:
    head = b'content-disposition: form-data; name="file"; filename="%b"\r\n\r\n' % (b"x" * 5000)
    with pytest.raises(FormError, match="header over 4096 bytes"):
        read_form(form(head), KIND)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(field(b"x", b"1")), b"application/json"),
        (form(field(b"x", b"1")), b"multipart/form-data"),
        (form(field(b"x", b"1")), b"multipart/form-data; boundary="),
        (form(field(b"x", b"1")), b"multipart/form-data; boundary=other"),
        (form(field(b"x", b"1"), end=b""), KIND),
        (b"", KIND),
        (b"--b", KIND),
        (b"--b\r\nno head", KIND),
        (form(b"x: y\r\n\r\nvalue"), KIND),
        (form(b"\r\n\r\nvalue"), KIND),
        (form(*[field(b"x", b"1")] * MAX_PARTS), KIND),
        (form(b"content-disposition: form-data; name=x" + b" " * 5000 + b"\r\n\r\n"), KIND),
    ],
)
def test_malformed_form_raises(body: bytes, kind: bytes) -> None:
    with pytest.raises(FormError):
        read_form(body, kind)
