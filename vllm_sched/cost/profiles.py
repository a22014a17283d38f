"""Step times and sizes of workers, by name.

`data/` holds the curves that `python -m benchmarks.fit_profiles` fitted to measured kernel times,
with the errors of each fit. `ASSUMED` holds two linear models of publications: both omit attention,
so do not use them for long prompts.

How it fails: the source adds up the kernels of a step. What a mixed step costs besides them (0 to
six decode steps) is unknown: measure it (`calibrate`) or set `--mixed-ms`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, NamedTuple

from vllm_sched.cost.curved_step_time import step_time_of
from vllm_sched.cost.profile_fit import FitError
from vllm_sched.cost.step_time import StepKind, StepTime
from vllm_sched.errors import UsageError

PAPER: Final = '"Deferred prefill for throughput maximization in LLM inference"'
DISTSERVE: Final = (
    "https://github.com/LLMServe/DistServe, "
    "simdistserve/estimators/profile_data/profiler-a100-80g.vllm.json"
)
ASSUMPTION: Final = "an assumption (no publication known)"
QUANTIZED: Final = "--quantization=fp8"  # a bf16 checkpoint, on load
EXTRA: Final = "vllm-sched[aiconfigurator]"
KEYS: Final = ("model", "system", "dtype", "tp")
DEFAULTS: Final = {"dtype": "bf16", "tp": "1"}
# vLLM's default share of the GPU memory.
MEMORY_SHARE: Final = 0.92


class ProfileKey(NamedTuple):
    model: str
    system: str
    dtype: str
    tp: int

    @property
    def name(self) -> str:
        return f"{self.system}-{self.model}-{self.dtype}-tp{self.tp}"


class NotBuiltInError(UsageError):
    """No data file has this profile; the optional source may."""

    def __init__(self, reason: str, key: ProfileKey) -> None:
        super().__init__(reason)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    gpus: int = 1
    gpu_bytes: int  # memory of a GPU
    other_bytes: int  # of them, for weights and all else besides the KV cache
    gpu_token_bytes: int  # KV of a token on each GPU
    kv_token_bytes: int  # KV of a token, as transferred between workers
    kv_pieces: int  # contiguous pieces per block
    max_model_len: int
    max_num_batched_tokens: int = 8192  # vLLM's server default for the GPU size
    max_num_seqs: int = 1024

    def kv_tokens(self, share: float = MEMORY_SHARE) -> int:
        return max(int((share * self.gpu_bytes - self.other_bytes) / self.gpu_token_bytes), 0)


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    what: str
    source: str
    time: StepTime
    size: WorkerSize
    errors: Mapping[StepKind, FitError] = field(default_factory=dict)  # by kind of step
    key: ProfileKey | None = None
    remark: str = ""
    flags: tuple[str, ...] = ()  # of vLLM, that the step times hold for


def to_json(profile: Profile) -> dict[str, Any]:
    """Return a profile as it stands in a data file."""
    size = profile.size
    key = profile.key
    return {
        **({} if key is None else key._asdict()),
        "what": profile.what,
        "size": {name: getattr(size, name) for name in WorkerSize.__slots__},
        "step_time": profile.time.to_json(),
        "errors": {
            kind: {"median": round(e.median, 4), "worst": round(e.worst, 3), "steps": e.steps}
            for kind, e in profile.errors.items()
        },
        **({"remark": profile.remark} if profile.remark else {}),
        **({"flags": list(profile.flags)} if profile.flags else {}),
    }


def checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a data file's content without its `sha256`."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@cache
def data_files() -> dict[str, dict[str, Any]]:
    folder = files("vllm_sched.cost") / "data"
    return {
        file.name: json.loads(file.read_text())
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".json")
    }


@cache
def measured() -> dict[ProfileKey, Profile]:
    profiles: dict[ProfileKey, Profile] = {}
    for content in data_files().values():
        source = (
            f"{content['source']} {content['version']}, {content['backend']}, {content['date']}"
        )
        for entry in content["profiles"]:
            key = ProfileKey(*(entry[name] for name in ProfileKey._fields))
            profiles[key] = Profile(
                key.name,
                entry["what"],
                source,
                step_time_of(entry["step_time"]),
                WorkerSize(**entry["size"]),
                {kind: FitError(**error) for kind, error in entry["errors"].items()},
                key,
                entry.get("remark", ""),
                tuple(entry.get("flags", ())),
            )
    return profiles


def _a100(weights: float, kv: int, layers: int, longest: int = 131_072) -> WorkerSize:
    return WorkerSize(
        gpu_bytes=80_000_000_000,
        other_bytes=int(weights + 3.5e9),
        gpu_token_bytes=kv,
        kv_token_bytes=kv,
        kv_pieces=2 * layers,
        max_model_len=longest,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
    )


ASSUMED: Final = {
    profile.name: profile
    for profile in (
        Profile(
            "a100-8b",
            "8B on an A100 80 GB, vLLM V0: the regime of deferred prefill's paper",
            f"{ASSUMPTION}, in the regime of {PAPER}: decode 10 ms + 0.06 ms a sequence, prefill "
            "11 ms + 0.095 ms a token; c_p/c_d within the 0.9 to 1.25 of published fits",
            StepTime(decode_fixed_s=0.010, decode_s=6e-5, prefill_fixed_s=0.011, prefill_s=9.5e-5),
            _a100(16.1e9, 131_072, 32),
        ),
        Profile(
            "a100-opt-13b",
            "OPT-13B on an A100 80 GB, vLLM",
            f"DistServe's fit for vLLM, version unknown ({DISTSERVE}): prefill 22.1 ms + 0.1405 "
            "ms a token, decode 23.5 ms + 0.0607 ms a sequence",
            StepTime(
                decode_fixed_s=0.0235, decode_s=6.07e-5, prefill_fixed_s=0.0221, prefill_s=1.405e-4
            ),
            _a100(26e9, 819_200, 40, 2048),
        ),
    )
}
SHORT_MODELS: Final = {"8b": "llama-3.1-8b", "70b": "llama-3.1-70b"}
NAME: Final = re.compile(r"(\w+)-(.+?)(?:-((?:bf|fp)\d+))?(?:-tp(\d{1,4}))?")


def key_of_name(name: str) -> ProfileKey | None:
    """Return the key of SYSTEM-MODEL[-DTYPE][-tpN]; None if it has another form."""
    if (match := NAME.fullmatch(name)) is None:
        return None
    system, model, dtype, tp = match.groups()
    model = SHORT_MODELS.get(model, model)
    return ProfileKey(model, system, dtype or DEFAULTS["dtype"], int(tp or DEFAULTS["tp"]))


ALIASES: Final = {
    name: key
    for name in ("a100-70b-tp4", "h100-8b", "h100-70b-tp4", "h200-8b", "h200-70b-tp4")
    if (key := key_of_name(name))
}
SHORT_NAMES: Final = (*ASSUMED, *ALIASES)
USAGE: Final = (
    f"{', '.join(SHORT_NAMES)}, a name that `vllm-sched profiles` lists, or "
    "model=M,system=S,tp=N,dtype=D"
)


def _key(text: str) -> ProfileKey:
    parts = DEFAULTS | read_parts(text)
    for name in KEYS:
        if name not in parts:
            raise UsageError(f"profile {text}: {name} is missing; valid: {_values(name)}")
    return ProfileKey(parts["model"], parts["system"], parts["dtype"], int(parts["tp"]))


def matching_names(text: str) -> list[str]:
    """Return the built-in profiles of `model=M,system=S`; each tp and dtype unless given.

    Another text is returned as it is.
    """
    if "=" not in text or (wanted := read_parts(text)).keys() >= set(KEYS):
        return [text]
    key = _key(text)

    def matches(other: ProfileKey) -> bool:
        return all(str(getattr(other, name)) == value for name, value in wanted.items())

    names = [key.name for key in measured() if matches(key)]
    if not names:
        reasons = (f"{key.dtype}: {why}" for key, why in unavailable().items() if matches(key))
        why = "; ".join(dict.fromkeys(reasons))
        raise NotBuiltInError(f"profile {text}: {_mismatch(key, list(measured()), why)}", key)
    return names


def read_parts(text: str) -> dict[str, str]:
    """Return the values of `KEY=VALUE,KEY=VALUE`; a value may have quotation marks."""
    reader = shlex.shlex(text, posix=True)
    reader.whitespace += ","
    reader.whitespace_split, reader.commenters = True, ""
    try:
        parts = list(reader)
    except ValueError:
        raise UsageError(f"profile {text}: a quotation mark is not closed") from None
    values: dict[str, str] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in KEYS or not value:
            raise UsageError(f"profile {text}: {part!r} is not KEY=VALUE of {', '.join(KEYS)}")
        if name in values:
            raise UsageError(f"profile {text}: {name} is given twice")
        values[name] = value
    tp = values.get("tp", "1")
    if not (tp.isascii() and tp.isdigit() and len(tp) < 5 and int(tp)):
        raise UsageError(f"profile {text}: tp={tp} is not a number of GPUs")
    return values


def find(text: str) -> Profile:
    """Return a built-in profile, or raise an error with the valid names or values."""
    if (profile := ASSUMED.get(text)) is not None:
        return profile
    built_in = measured()
    spelt_out = "=" in text
    key = _key(text) if spelt_out else key_of_name(text)
    if key is None or not (spelt_out or any(key.system == other.system for other in built_in)):
        raise UsageError(
            f"unknown profile {text!r}; valid: {USAGE}; valid systems: {_values('system')}; or "
            "measure your own with `vllm-sched calibrate --save cost.json`"
        )
    if key in built_in:
        return built_in[key]
    why = unavailable().get(key, "")
    raise NotBuiltInError(f"profile {text}: {_mismatch(key, list(built_in), why)}", key)


def _mismatch(key: ProfileKey, keys: list[ProfileKey], why: str) -> str:
    """Return which part of the key no built-in profile has, with the valid values."""
    for place, name in ((1, "system"), (0, "model"), (2, "dtype"), (3, "tp")):
        matching = [other for other in keys if other[place] == key[place]]
        if not matching:
            valid = ", ".join(str(value) for value in dict.fromkeys(other[place] for other in keys))
            because = f" ({why})" if why else ""
            return f"no built-in profile has {name}={key[place]}; valid here: {valid}{because}"
        keys = matching
    raise AssertionError(key)


@cache
def unavailable() -> dict[ProfileKey, str]:
    """Return what the source cannot give, with the reasons."""
    return {
        ProfileKey(*(entry[name] for name in ProfileKey._fields)): entry["why"]
        for content in data_files().values()
        for entry in content["missing"]
    }


def _values(name: str) -> str:
    return ", ".join(sorted({str(getattr(key, name)) for key in measured()}))
