"""Whether outputs of a model can be constrained, and where such requests are prepared."""

from workers.config import EngineConfig
from workers.constraints.desk import CompilingDesk, GrammarDesk, NoGrammars
from workers.loading.model_folder import TOKENIZER_FILE, ModelFacts
from workers.models.base import CausalLM


def make_grammar_desk(facts: ModelFacts) -> GrammarDesk:
    reason = why_no_grammars(facts)
    if reason:
        return NoGrammars(reason)
    # Read where grammars can be had only: no step needs it.
    from workers.constraints.compiler import GrammarCompiler

    return CompilingDesk(GrammarCompiler(facts.folder, facts.vocab_size, facts.eos_token_ids))


def why_no_grammars(facts: ModelFacts) -> str:
    """Empty where they can be had."""
    if not (facts.folder / TOKENIZER_FILE).is_file():
        return f"the model folder has no {TOKENIZER_FILE}, which grammars are matched with"
    if not facts.eos_token_ids:
        return "the model has no token that ends a sequence"
    return ""


def can_repeat_slots(config: EngineConfig, model: CausalLM) -> bool:
    """Whether a step may have several rows of one slot: nothing but keys and values is kept of it,
    and the device does not find out how long it is."""
    return not (model.state_entries or model.encoder or model.media or config.speculative)


def can_run_again(model: CausalLM) -> bool:
    """Whether a row may bring a token that it has brought before: its keys and values are what they
    were, while a state would take the token in twice."""
    return not model.state_entries
