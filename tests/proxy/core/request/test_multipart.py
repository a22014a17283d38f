"""Multipart forms."""

from __future__ import annotations

import pytest

from proxy.core.request.multipart import MAX_PARTS, MAX_PLAIN_HEAD_BYTES, form_fields, plain_model

TYPE = b"multipart/form-data; boundary=XyZ"


def form(*parts: tuple[bytes, bytes]) -> bytes:
    """Write a form of parts: the rest of a Content-Disposition, and a value."""
    head = b"--XyZ\r\nContent-Disposition: form-data; "
    return b"".join(head + how + b"\r\n\r\n" + value + b"\r\n" for how, value in parts) + b"--XyZ--"


def test_a_quoted_boundary() -> None:
    body = form((b'name="model"', b"w"), (b'name="stream"', b"true"))
    quoted = b'multipart/form-data; boundary="XyZ"; charset=utf-8'
    assert form_fields(body, quoted) == {"model": "w", "stream": "true"}


def test_bytes_inside_a_file_are_not_taken_for_a_field() -> None:
    fake = b'form-data; name="model"\r\n\r\nevil\r\n--XyZ'
    body = form((b'name="file"; filename="a"', b"RIFF" + fake), (b'name="model"', b"w"))
    assert form_fields(body, TYPE)["model"] == "w"


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


# By which it is judged what a client may use

FILE = (b'name="file"; filename="a.wav"', b"RIFF\x00\r\n\r\n\n--")
NAMED = (b'name="model"', b"w")


@pytest.mark.parametrize(
    "file",
    [b'"a.wav"', b'"my name.wav"', b'""', b"\"x.wav\"; filename*=utf-8''%C3%A9.wav"],
)
@pytest.mark.parametrize(
    "kind", [TYPE, b'multipart/form-data;boundary="XyZ"', b"Multipart/Form-Data; boundary=XyZ"]
)
def test_forms_as_libraries_write_them_are_plain(kind: bytes, file: bytes) -> None:
    sound = (b'name="file"; filename=' + file + b"\r\nContent-Type: audio/wav", FILE[1])
    many = (b'name="timestamp_granularities[]"', b"word")
    assert plain_model(form(sound, many, NAMED, many), kind) == "w"
    typed = form(NAMED, sound).replace(b"Content-D", b"Content-Type: text/plain\r\ncontent-d")
    assert plain_model(typed, kind) == "w"


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [FILE],
        [NAMED, NAMED],
        [NAMED, (b'name="model"', b"v")],
        [NAMED, (b"name=model", b"v")],
        [NAMED, (b"NAME=model", b"v")],
        [NAMED, (b'Name="file"; name = model', b"v")],
        [NAMED, (b"name*=utf-8''mod%65l", b"v")],
        [NAMED, (b'name*0="mo"; name*1="del"', b"v")],
        [NAMED, (b'name="x"; name="model"', b"v")],
        [NAMED, (b'name="x"; filename="a"; name="model"', b"v")],
        [NAMED, (b'name="x"; filename="a";name*=utf-8\'\'model', b"v")],
        [NAMED, (b'name="x"\r\nContent-Disposition: form-data; name="model"', b"v")],
        [(b'name="model"\r\nContent-Disposition: form-data; name=x', b"w")],
        [(b'name="model"\r\nContent-Disposition : form-data; name="x"', b"w")],
        [(b'name="model"; filename="a"', b"w")],
        [(b'name="file"', b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nw')],
        [NAMED, (b'x="y"', b"v")],
        [NAMED, *[FILE] * MAX_PARTS],
        [NAMED, (b'name="x"; filename="' + b"a" * MAX_PLAIN_HEAD_BYTES, b"v")],
    ],
)
def test_a_form_that_parsers_may_read_otherwise_names_no_model(
    parts: list[tuple[bytes, bytes]],
) -> None:
    assert plain_model(form(*parts), TYPE) is None
    assert plain_model(form(*reversed(parts)), TYPE) is None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", TYPE),
        (form(NAMED), b""),
        (form(NAMED), b"multipart/form-data; boundary=XyZ; boundary=other"),
        (form(NAMED), b'multipart/form-data; x="boundary=XyZ"; boundary=other'),
        (form(NAMED), b"multipart/form-data; boundary=XyZ; charset=utf-7"),
        (form(NAMED), b"application/x-www-form-urlencoded; boundary=XyZ"),
        (b"before\r\n" + form(NAMED), TYPE),
        (form(NAMED).removesuffix(b"--"), TYPE),
        (form(NAMED).replace(b"\r\n--XyZ--", b"\n--XyZ--"), TYPE),
        (form(NAMED, FILE).replace(b"\r\n--XyZ\r\n", b"\r\n--XyZ \r\n"), TYPE),
        (form(NAMED, (b'name="x"', b"--XyZ")), TYPE),
        (form(FILE, NAMED).replace(FILE[1] + b"\r\n", b""), TYPE),  # `model` is in the file
    ],
)
def test_no_more_does_one_whose_parts_may_be_told_apart_otherwise(body: bytes, kind: bytes) -> None:
    assert plain_model(body, kind) is None
