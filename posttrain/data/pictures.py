"""Pictures of messages: references to files and bytes, their size from the header, pixels upright and over white."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.errors import ConfigError
from posttrain.runtime.files import content_digest, digest
from posttrain.user_code import missing_path

MAX_PIXELS = 64 * 2**20
"""Most pixels of a picture by its header, before it is decoded: a file of kilobytes can hold gigabytes of them."""
MAX_BYTES = 64 * 2**20
"""Most bytes of a picture's file."""
MAX_SCANS = 256
"""Most scans of a JPEG in memory, each of which goes through all pixels: cameras and tools write up to some twenty."""
SCAN = b"\xff\xda"
"""Marker before a scan."""
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")
"""Formats that are read, in Pillow's names. Others have parsers that start programs."""
ORIENTATION = 0x0112
"""EXIF tag of how the camera was held."""
SIDEWAYS = (5, 6, 7, 8)
"""Values of the tag for which width and height change places."""
MARKER = "<image>"
"""Marker of LLaVA's and verl's texts, read where `dataset.image_marker` says so."""
MAX_PATH = 4096
"""Bytes of the longest path, with its end."""
MAX_NAME = 255
"""Bytes of the longest name in a path."""
SHORTEST_BASE64 = 32
"""Characters of the base64 of the smallest file that could be a picture."""
BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "_9j_", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0AK", "AAAA", "UD")
"""First characters of base64 of the files of `FORMATS`: PNG, JPEG (also in the alphabet of URLs), GIF, WEBP, BMP, TIFF
in both orders, AVIF, PPM."""
GRAY_16 = 257
"""Ratio of 16-bit to 8-bit gray."""


class PictureError(ConfigError):
    """Error of a picture that cannot be read, with its name."""


@dataclass(frozen=True, eq=False)
class Picture:
    """Picture that is opened when its size or its pixels are asked for."""

    name: str
    """Name in errors: its place in the row, and its file."""
    source: Path | bytes | Any
    """File, content of a file, or an image of Pillow."""

    @property
    def key(self) -> str:
        """File, or digest of bytes in memory: the same for the same picture of a run."""
        return str(self.source) if isinstance(self.source, Path) else digest(self.content())

    @property
    def digest(self) -> str:
        """Digest of the whole file, or of the pixels of an open image. OSError without the file."""
        if isinstance(self.source, Path):
            return content_digest(self.source)
        if isinstance(self.source, bytes):
            return digest(self.source)
        pixels = self.pixels()
        return digest(f"{pixels.size} ".encode() + pixels.tobytes())

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright picture, from the header alone. PictureError for a file without one, and for
        more pixels than `MAX_PIXELS`."""
        with self._opened() as image:
            width, height = image.size
            return (height, width) if _orientation(image) in SIDEWAYS else (width, height)

    def pixels(self) -> Any:
        """Decode the picture to an upright RGB image over white; of an animation the first frame. PictureError for a
        file that is damaged."""
        with self._opened() as image:
            return _turned(_over_white(image), _orientation(image))

    def content(self) -> bytes:
        """Bytes of the file, or of the pixels of an open image."""
        if isinstance(self.source, bytes):
            return self.source
        return self.source.read_bytes() if isinstance(self.source, Path) else bytes(self.source.tobytes())

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the picture and check its size, without decoding it. PictureError for what Pillow raises meanwhile."""
        from PIL import Image, UnidentifiedImageError

        source, file = self.source, None
        if isinstance(source, Path) and not source.is_file():
            raise PictureError(f"{self.name}: {missing_path(source)}")
        try:
            if isinstance(source, Path | bytes):
                file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
                self._check_bytes(len(source) if isinstance(source, bytes) else source.stat().st_size)
                Image.init()
                source = Image.open(file, formats=[one for one in FORMATS if one in Image.OPEN])
            self._check_size(*source.size)
            self._check_scans(source)
            yield source
        except UnidentifiedImageError as error:
            raise PictureError(f"{self.name} is no picture; these are read: {', '.join(FORMATS)}") from error
        except ConfigError:
            raise
        except (
            OSError,
            ValueError,
            SyntaxError,
            Image.DecompressionBombError,
            Image.DecompressionBombWarning,
        ) as error:
            raise PictureError(f"{self.name} cannot be decoded: {' '.join(str(error).split())[:200]}") from error
        finally:
            if file is not None:
                file.close()

    def _check_bytes(self, count: int) -> None:
        if count > MAX_BYTES:
            raise PictureError(f"{self.name} has {count:,} bytes, more than {MAX_BYTES:,}; make it smaller")

    def _check_scans(self, image: Any) -> None:
        """PictureError for a JPEG that was sent, and takes minutes to decode."""
        if image.format in ("JPEG", "MPO") and isinstance(self.source, bytes):
            count = self.source.count(SCAN)
            if count > MAX_SCANS:
                raise PictureError(f"{self.name} is a JPEG of {count} scans, more than {MAX_SCANS}; save it anew")

    def _check_size(self, width: int, height: int) -> None:
        if not width or not height:
            raise PictureError(f"{self.name} has {width} x {height} pixels; leave it out")
        if width * height > MAX_PIXELS:
            raise PictureError(
                f"{self.name} has {width} x {height} pixels by its header, more than {MAX_PIXELS:,}; make it smaller"
            )


def _orientation(image: Any) -> int:
    """EXIF orientation; 1 for upright ones. Of a PNG only what stands before its pixels counts: looking behind them
    decodes it. Pillow turns TIFF itself."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    return int(image.getexif().get(ORIENTATION) or 1)


def _turned(image: Any, orientation: int) -> Any:
    from PIL.Image import Transpose as turn

    turns = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_270,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _over_white(image: Any) -> Any:
    """RGB image with white behind what is transparent."""
    from PIL import Image

    if image.mode.startswith("I"):
        # Pillow has 16 bits of a PNG or PPM in 32; any other 32 bits may hold 8 or 16.
        if image.mode == "I" and image.format not in ("PNG", "PPM"):
            raise ValueError("gray values of 32 bits, of which 8 or 16 may be used; convert it to mode L or I;16")
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() >= 2**16:
            raise ValueError(f"gray values from {values.min()} to {values.max()}; 8 and 16 bits are read")
        transparent = values == image.info.get("transparency", -1)
        values = np.where(transparent, 255, (values + GRAY_16 // 2) // GRAY_16)
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers; save it with 8 or 16 bits")
    if not image.has_transparency_data:
        return image.convert("RGB")
    whole = image.convert("RGBA")
    white = Image.new("RGBA", whole.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, whole).convert("RGB")


def picture_of(value: Any, name: str, folder: Path) -> Picture:
    """Picture of what a column or a part of a message holds: a path, a `data:` URL, bytes, an image of Pillow, or a
    mapping with one of these. ConfigError for anything else.

    `name`: its place in the row; `folder`: that of relative paths.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, Mapping):
        there = {key: value[key] for key in ("bytes", "path", "url", "image") if value.get(key) is not None}
        unknown = [key for key in value if key not in ("bytes", "path", "url", "image", "detail")]
        if not there or unknown:
            kind = ConfigError if unknown or not value else PictureError
            raise kind(f"{name} is a mapping with {', '.join(map(str, value))}; it needs bytes or path")
        held = next(iter(there.values()))
        title = f"{name} ({there['path']})" if isinstance(held, bytes) and there.get("path") else name
        return picture_of(held, title, folder)
    if isinstance(value, bytes | bytearray):
        return Picture(name, bytes(value))
    if isinstance(value, str | Path):
        return _named(str(value), name, folder)
    if hasattr(value, "convert") and hasattr(value, "getexif"):
        return Picture(name, value)
    raise ConfigError(
        f"{name} is a {type(value).__name__}; a picture is a path, a data: URL, bytes, an image of Pillow, or a "
        "mapping with bytes or path"
    )


def is_path(text: str) -> bool:
    """Tell whether a file system may hold a file of this name: others raise an error when they are looked for."""
    names = text.split("/")
    return "\0" not in text and len(text.encode()) < MAX_PATH and all(len(n.encode()) <= MAX_NAME for n in names)


def base64_picture(text: str) -> bytes | None:
    """Content of a picture's file that is written as base64, also of URLs or with line ends; None for other text, such
    as a path."""
    if not text.startswith(BASE64_STARTS):
        return None
    plain = "".join(text.split()).replace("-", "+").replace("_", "/").rstrip("=")
    if len(plain) < SHORTEST_BASE64:
        return None
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except binascii.Error:
        return None


def _named(text: str, name: str, folder: Path) -> Picture:
    """Picture of a path, of a `data:` URL, or of base64 alone."""
    if text.startswith("data:"):
        kind, comma, encoded = text.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise ConfigError(f"{name} is a data: URL without base64; write data:image/png;base64,...")
        try:
            return Picture(name, base64.b64decode(encoded, validate=True))
        except binascii.Error as error:
            raise ConfigError(f"{name}: the base64 of its data: URL is damaged ({error})") from error
    if "://" in text and not text.startswith("file://"):
        raise ConfigError(
            f"{name} is the URL {text[:80]}, and nothing is fetched while training; download it, and give its path"
        )
    named = text.removeprefix("file://")
    # Base64 may begin as an absolute path does (/9j/ of JPEG): a file that is there comes first.
    there = is_path(named) and (folder / Path(named).expanduser()).is_file()
    if not there and (content := base64_picture(text)) is not None:
        return Picture(name, content)
    if not is_path(named):
        raise PictureError(
            f"{name} is a text of {len(text):,} characters, {text[:24]!r}..., neither a path nor base64 of a picture "
            f"({', '.join(FORMATS)})"
        )
    return Picture(f"{name} ({text})", folder / Path(named).expanduser())


class Pictures(Sequence[Any]):
    """Pictures as images of Pillow, upright, RGB and over white, each decoded when it is asked for."""

    def __init__(self, pictures: Sequence[Picture]):
        self._pictures, self._decoded = tuple(pictures), dict[int, Any]()

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Pictures(self._pictures[index])
        number = range(len(self))[index]
        if number not in self._decoded:
            self._decoded[number] = self._pictures[number].pixels()
        return self._decoded[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return Pictures, (self._pictures,)


def written(value: Any, *, is_picture: bool = False) -> Any:
    """Row in memory as JSON can hold it: pictures are `data:` URLs, and paths of theirs do not depend on the current
    folder; other values are unchanged."""
    if isinstance(value, Mapping):
        inside = is_picture or value.get("type") == "image"
        names = ("image", "images", *(("path", "bytes") if inside else ()))
        return {name: written(item, is_picture=name in names) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [written(item, is_picture=is_picture) for item in value]
    if isinstance(value, Picture):
        return written(value.source, is_picture=True)
    if not is_picture:
        return value
    value = value.source if isinstance(value, Picture) else value
    if isinstance(value, str | Path):
        path = Path(value).expanduser()
        named = re.match(r"data:|\w+://", str(value)) is None
        return str(path.absolute()) if named and path.is_file() else str(value)
    if isinstance(value, bytes):
        return f"data:image;base64,{base64.b64encode(value).decode()}"
    if hasattr(value, "convert") and hasattr(value, "getexif"):
        file = io.BytesIO()
        Picture("image", value).pixels().save(file, "PNG")
        return written(file.getvalue(), is_picture=True)
    return value


def data_url(picture: Picture) -> str:
    """Picture as a `data:` URL: the bytes of its file, or an open image as PNG."""
    is_open = not isinstance(picture.source, Path | bytes)
    return str(written(picture.source if is_open else picture.content(), is_picture=True))


class RowPictures:
    """Pictures of a row, of which those of its columns `images` (a list) or `image` fill the holes in its messages, in
    order. `marker`: text of a hole in contents; `folder`: that of relative paths."""

    def __init__(self, row: Mapping[str, Any], folder: Path, marker: str | None = None) -> None:
        columns = [name for name in ("images", "image") if row.get(name) is not None]
        if len(columns) > 1:
            raise ConfigError("the row has pictures in both columns images and image; give one of them")
        held = row[columns[0]] if columns else []
        several = isinstance(held, list | tuple | np.ndarray)
        if columns == ["images"] and not several:
            raise ConfigError(f"column images holds a {type(held).__name__}; it must be a list of pictures")
        names = [f"images[{number}]" for number in range(len(held))] if several else ["image"]
        self._column = [
            picture_of(one, name, folder) for one, name in zip(held if several else [held], names, strict=True)
        ]
        self._folder, self._marker = folder, marker
        self._holes = 0

    def part(self, fields: Mapping[str, Any], at: str) -> dict[str, Any]:
        """Part of a message with its picture. ConfigError for a hole that no picture is left for."""
        held = {key: value for key, value in fields.items() if key != "type"}
        if fields["type"] == "image_url":
            return {"type": "image", "image": picture_of(held.get("image_url"), at, self._folder)}
        if held:
            return {"type": "image", "image": picture_of(held, at, self._folder)}
        self._holes += 1
        if self._holes > len(self._column):
            raise ConfigError(
                f"{at} is image {self._holes} of the messages, and the row has {len(self._column)} in its columns "
                "(images, image); the counts must be the same"
            )
        return {"type": "image", "image": self._column[self._holes - 1]}

    def parts(self, text: str, at: str) -> str | list[dict[str, Any]]:
        """Content of a text: parts where it holds the marker of an image."""
        if self._marker is None or self._marker not in text:
            return text
        first, *rest = text.split(self._marker)
        parts = [{"type": "text", "text": first}]
        for after in rest:
            parts += [self.part({"type": "image"}, at), {"type": "text", "text": after}]
        return [one for one in parts if one.get("text") != ""]

    @property
    def left(self) -> int:
        """Number of pictures in the columns that have no place."""
        return len(self._column) - self._holes

    def placed(self, messages: Sequence[Any]) -> list[Any]:
        """Messages with the pictures of the columns: without any hole, all stand before the first user's text.
        ConfigError for more pictures than holes."""
        if self.left and self._holes:
            raise ConfigError(
                f"the row has {len(self._column)} pictures in its columns, and its messages {self._holes} places for "
                "them; the counts must be the same"
            )
        if not self.left:
            return list(messages)
        if self._marker is None and sum(str(one.get("content")).count(MARKER) for one in messages) == len(self._column):
            raise ConfigError(
                f"the messages hold {MARKER} as often as the row has pictures, and it would be text; set "
                f"dataset.image_marker to {MARKER} if that is where they stand, else to something that is in no text"
            )
        first = next((number for number, one in enumerate(messages) if one["role"] == "user"), None)
        if first is None:
            raise ConfigError("the row has pictures, and no user message to put them into")
        asked = messages[first]
        content = asked.get("content", "")
        text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        images = [{"type": "image", "image": one} for one in self._column]
        return [*messages[:first], {**asked, "content": [*images, *text]}, *messages[first + 1 :]]
