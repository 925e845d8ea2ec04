"""flite through ctypes: text to a wave and its phones. Debian's libflite1, installed or unpacked, is enough."""

from ctypes import CDLL, POINTER, RTLD_GLOBAL, Structure, c_char_p, c_float, c_int, c_short, c_void_p
from pathlib import Path

import numpy as np
from cosyvoice_triton.constants import PROMPT_SAMPLE_RATE

from demo_voice.training.dataset import TOKEN_PHONES, TOKEN_SAMPLES

# The demo's two voices first; the others add variety to the training data.
VOICES = ("slt", "rms", "awb", "kal16")
PHONES = (
    "pau aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh t th uh uw v w y z zh"
).split()
PHONE_RATE = 100

# name: (type of the result, types of the arguments)
_FUNCTIONS = {
    "flite_synth_text": (c_void_p, (c_char_p, c_void_p)),
    "utt_relation": (c_void_p, (c_void_p, c_char_p)),
    "relation_head": (c_void_p, (c_void_p,)),
    "item_next": (c_void_p, (c_void_p,)),
    "item_feat_string": (c_char_p, (c_void_p, c_char_p)),
    "item_feat_float": (c_float, (c_void_p, c_char_p)),
    "delete_utterance": (None, (c_void_p,)),
}


class _Wave(Structure):
    """cst_wave."""

    _fields_ = (
        ("type", c_char_p),
        ("sample_rate", c_int),
        ("samples", c_int),
        ("channels", c_int),
        ("data", POINTER(c_short)),
    )


class Flite:
    """flite with the voices VOICES. folder: contains libflite1, at any depth; OSError if it does not."""

    def __init__(self, folder: Path) -> None:
        found = sorted(folder.rglob("libflite.so.1"))
        if not found:
            raise OSError(f"no libflite.so.1 under {folder}: unpack Debian's libflite1 there (dpkg -x)")
        libraries = found[0].parent
        for path in sorted(folder.rglob("libasound.so.2")):
            CDLL(str(path), mode=RTLD_GLOBAL)  # libflite cannot be loaded without it

        def load(name: str) -> CDLL:
            return CDLL(str(libraries / f"{name}.so.1"), mode=RTLD_GLOBAL)

        self._lib = load("libflite")
        for name in ("libflite_usenglish", "libflite_cmulex"):
            load(name)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self._lib.utt_wave.restype, self._lib.utt_wave.argtypes = POINTER(_Wave), (c_void_p,)
        self._lib.flite_init()
        self._voices = []
        for voice in VOICES:
            register = getattr(load(f"libflite_cmu_us_{voice}"), f"register_cmu_us_{voice}")
            register.restype, register.argtypes = c_void_p, (c_void_p,)
            self._voices.append(register(None))

    def synthesize(self, text: str, voice: int) -> tuple[np.ndarray, np.ndarray]:
        """16 kHz wave (T * 640,) int16, padded to whole tokens, and phones (T * 4,) uint8, indices of PHONES."""
        lib = self._lib
        utterance = lib.flite_synth_text(text.encode("ascii"), self._voices[voice])
        try:
            wave = lib.utt_wave(utterance).contents
            if wave.sample_rate != PROMPT_SAMPLE_RATE:
                raise ValueError(f"voice {VOICES[voice]} is at {wave.sample_rate} Hz, not {PROMPT_SAMPLE_RATE}")
            tokens = -(-wave.samples // TOKEN_SAMPLES)
            samples = np.zeros(tokens * TOKEN_SAMPLES, np.int16)
            samples[: wave.samples] = np.ctypeslib.as_array(wave.data, (wave.samples,))
            return samples, self._phones(utterance, tokens * TOKEN_PHONES)
        finally:
            lib.delete_utterance(utterance)

    def _phones(self, utterance: int, length: int) -> np.ndarray:
        lib, phones, begin = self._lib, np.zeros(length, np.uint8), 0
        segment = lib.relation_head(lib.utt_relation(utterance, b"Segment"))
        while segment:
            end = round(lib.item_feat_float(segment, b"end") * PHONE_RATE)
            name = lib.item_feat_string(segment, b"name").decode()
            phones[begin:end] = PHONES.index(name) if name in PHONES else 0
            begin, segment = end, lib.item_next(segment)
        return phones
