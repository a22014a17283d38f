"""Multipart forms."""

from __future__ import annotations

import pytest

from proxy.core.request.multipart import MAX_PARTS, MAX_PLAIN_HEAD_BYTES, form_fields, plain_model

TYPE = b"multipart/form-data; boundary=XyZ"


def form(*parts: tuple[bytes, bytes]) -> bytes:
    """Return a form of parts, each the rest of a Content-Disposition and a value."""
    head = b"--XyZ\r\nContent-Disposition: form-data; "
    return (
        b"".join(head + disposition + b"\r\n\r\n" + value + b"\r\n" for disposition, value in parts)
        + b"--XyZ--"
    )


WORKER = form((b'name="model"', b"w"))


@pytest.mark.parametrize(
    ("body", "content_type", "model"),
    [
        (WORKER, b'multipart/form-data; boundary="XyZ"; charset=utf-8', "w"),
        (b'name="model"\r\n' + WORKER, TYPE, "w"),  # before the first part
        (b"", TYPE, None),
        (b'name="model"', TYPE, None),
        (b'--XyZ\r\nContent-Disposition: form-data; name="model"', TYPE, None),
        (b'--XyZ\r\nContent-Disposition: form-data; name="model"\r\n\r\nw', TYPE, None),
        (WORKER, b"multipart/form-data", None),
        (WORKER, b"", None),
        (WORKER, b"multipart/form-data; boundary=other", None),
    ],
)
def test_only_whole_parts_between_boundaries_are_fields(
    body: bytes, content_type: bytes, model: str | None
) -> None:
    assert form_fields(body, content_type) == ({} if model is None else {"model": model})


def test_bytes_inside_a_file_are_no_field() -> None:
    fake = b'form-data; name="model"\r\n\r\nevil\r\n--XyZ'
    stream = (b'name="stream"', b"true")
    body = form((b'name="file"; filename="a"', b"RIFF" + fake), (b'name="model"', b"w"), stream)
    found = form_fields(body, TYPE)
    assert (found["model"], found["stream"]) == ("w", "true")


# The model that decides access

FILE_PART = (b'name="file"; filename="a.wav"', b"RIFF\x00\r\n\r\n\n--")
MODEL_PART = (b'name="model"', b"w")


@pytest.mark.parametrize(
    "file", [b'"a.wav"', b'"my name.wav"', b'""', b"\"x.wav\"; filename*=utf-8''%C3%A9.wav"]
)
@pytest.mark.parametrize(
    "content_type",
    [TYPE, b'multipart/form-data;boundary="XyZ"', b"Multipart/Form-Data; boundary=XyZ"],
)
def test_plain_model_of_forms_as_libraries_write_them(content_type: bytes, file: bytes) -> None:
    sound = (b'name="file"; filename=' + file + b"\r\nContent-Type: audio/wav", FILE_PART[1])
    many = (b'name="timestamp_granularities[]"', b"word")
    assert plain_model(form(sound, many, MODEL_PART, many), content_type) == "w"
    typed = form(MODEL_PART, sound).replace(b"Content-D", b"Content-Type: text/plain\r\ncontent-d")
    assert plain_model(typed, content_type) == "w"


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [FILE_PART],
        [MODEL_PART, MODEL_PART],
        [MODEL_PART, (b'name="model"', b"v")],
        [MODEL_PART, (b"name=model", b"v")],
        [MODEL_PART, (b"NAME=model", b"v")],
        [MODEL_PART, (b'Name="file"; name = model', b"v")],
        [MODEL_PART, (b"name*=utf-8''mod%65l", b"v")],
        [MODEL_PART, (b'name*0="mo"; name*1="del"', b"v")],
        [MODEL_PART, (b'name="x"; name="model"', b"v")],
        [MODEL_PART, (b'name="x"; filename="a"; name="model"', b"v")],
        [MODEL_PART, (b'name="x"; filename="a";name*=utf-8\'\'model', b"v")],
        [MODEL_PART, (b'name="x"\r\nContent-Disposition: form-data; name="model"', b"v")],
        [(b'name="model"\r\nContent-Disposition: form-data; name=x', b"w")],
        [(b'name="model"\r\nContent-Disposition : form-data; name="x"', b"w")],
        [(b'name="model"; filename="a"', b"w")],
        [(b'name="file"', b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nw')],
        [MODEL_PART, (b'x="y"', b"v")],
        [MODEL_PART, *[FILE_PART] * MAX_PARTS],
        [MODEL_PART, (b'name="x"; filename="' + b"a" * MAX_PLAIN_HEAD_BYTES, b"v")],
    ],
)
def test_ambiguous_form_has_no_plain_model(parts: list[tuple[bytes, bytes]]) -> None:
    assert plain_model(form(*parts), TYPE) is None
    assert plain_model(form(*reversed(parts)), TYPE) is None


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", TYPE),
        (form(MODEL_PART), b""),
        (form(MODEL_PART), b"multipart/form-data; boundary=XyZ; boundary=other"),
        (form(MODEL_PART), b'multipart/form-data; x="boundary=XyZ"; boundary=other'),
        (form(MODEL_PART), b"multipart/form-data; boundary=XyZ; charset=utf-7"),
        (form(MODEL_PART), b"application/x-www-form-urlencoded; boundary=XyZ"),
        (b"before\r\n" + form(MODEL_PART), TYPE),
        (form(MODEL_PART).removesuffix(b"--"), TYPE),
        (form(MODEL_PART).replace(b"\r\n--XyZ--", b"\n--XyZ--"), TYPE),
        (form(MODEL_PART, FILE_PART).replace(b"\r\n--XyZ\r\n", b"\r\n--XyZ \r\n"), TYPE),
        (form(MODEL_PART, (b'name="x"', b"--XyZ")), TYPE),
        (form(FILE_PART, MODEL_PART).replace(FILE_PART[1] + b"\r\n", b""), TYPE),  # in the file
    ],
)
def test_form_with_ambiguous_boundaries_has_no_plain_model(
    body: bytes, content_type: bytes
) -> None:
    assert plain_model(body, content_type) is None
