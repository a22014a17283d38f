"""Multipart forms."""

from __future__ import annotations

import pytest

from proxy.core.forms import form_fields

TYPE = b"multipart/form-data; boundary=XyZ"


def form(*parts: tuple[bytes, bytes]) -> bytes:
    """Write a form of parts: the rest of a Content-Disposition, and a value."""
    head = b"--XyZ\r\nContent-Disposition: form-data; "
    return b"".join(head + how + b"\r\n\r\n" + value + b"\r\n" for how, value in parts) + b"--XyZ--"


def test_the_model_is_found_behind_a_file() -> None:
    body = form((b'name="file"; filename="a.wav"', b"\x00" * 100_000), (b'name="model"', b"w"))
    assert form_fields(body, TYPE) == {"model": "w"}


def test_a_quoted_boundary() -> None:
    body = form((b'name="model"', b"w"), (b'name="stream"', b"true"))
    quoted = b'multipart/form-data; boundary="XyZ"; charset=utf-8'
    assert form_fields(body, quoted) == {"model": "w", "stream": "true"}


def test_bytes_inside_a_file_are_not_taken_for_a_field() -> None:
    fake = b'form-data; name="model"\r\n\r\nevil\r\n--XyZ'
    body = form((b'name="file"; filename="a"', b"RIFF" + fake), (b'name="model"', b"w"))
    assert form_fields(body, TYPE)["model"] == "w"


def test_a_value_too_long_is_no_model() -> None:
    assert form_fields(form((b'name="model"', b"w" * 10_000)), TYPE) == {}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", TYPE),
        (b'name="model"', TYPE),
        (b'--XyZ\r\nContent-Disposition: form-data; name="model"', TYPE),
        (b'--XyZ\r\nContent-Disposition: form-data; name="model"\r\n\r\nw', TYPE),
        (form((b'name="model"', b"w")), b"multipart/form-data"),
        (form((b'name="model"', b"w")), b""),
        (form((b'name="model"', b"w")), b"multipart/form-data; boundary=other"),
    ],
)
def test_what_is_no_form_has_no_fields(body: bytes, kind: bytes) -> None:
    assert form_fields(body, kind) == {}
