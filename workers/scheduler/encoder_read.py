"""What a request's encoder reads, as the scheduler knows it."""

from dataclasses import dataclass

from workers.engine.encoder_input import EncoderInfo, EncoderInput


@dataclass(frozen=True, slots=True)
class EncoderRead:
    """num_tokens: what the encoder makes of source. key: equal for equal sources under equal salts,
    and nobody else's: what is computed of tokens behind different sources is not the same."""

    source: EncoderInput
    num_tokens: int
    key: str

    @classmethod
    def of(cls, source: EncoderInput | None, salt: str, info: EncoderInfo) -> "EncoderRead":
        """Raises RequestRejectedError where the encoder does not take the source."""
        num_tokens = info.num_tokens_of(source)
        assert source is not None, "no encoder takes nothing"
        return cls(source, num_tokens, f"{source.digest} {salt}")
