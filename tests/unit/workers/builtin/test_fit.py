"""The fitting loop on toy models: windows, schedule, repeatability, choice of weights."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from workers.builtin import fit, train

_TINY = fit.ModelShape(
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
_CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _recipe(**changes: float) -> fit.Recipe:
    values = {
        "steps": 6,
        "batch_tokens": 2048,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "dropout": 0.1,
        "eval_every_steps": 2,
        "budget_s": 600.0,
        "seed": 0,
    } | changes
    return fit.Recipe(**values)  # type: ignore[arg-type]


def _documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        np.append(np.tile(rng.integers(4, 40, 5), 1 + int(rng.integers(400))), 0) for _ in range(12)
    ]


def _fit(**changes: float) -> tuple[nn.Module, fit.FitResult]:
    model = fit.build_model(_TINY, seed=0)
    held_out = torch.from_numpy(_documents()[0][:200].copy()).unfold(0, 51, 50)
    sampler = fit.WindowSampler(_documents(), 0, _CPU)
    points: list[fit.CurvePoint] = []
    result = fit.fit(
        model, sampler, held_out, _recipe(**changes), fit.next_token_loss, points.append
    )
    assert points == result.curve
    return model, result


def test_windows_have_the_full_context_or_half_and_labels_one_ahead() -> None:
    sampler = fit.WindowSampler(_documents(), 0, _CPU)
    batches = sampler.batches(4096)
    lengths = []
    for _ in range(20):
        inputs, labels = next(batches)
        assert inputs.numel() == labels.numel() == 4096
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        lengths.append(inputs.shape[1])
    assert set(lengths) == {1024, 2048}
    assert lengths.count(2048) == 5


def test_training_lowers_the_held_out_loss() -> None:
    _, result = _fit(steps=12)
    assert result.curve[-1].held_out < result.curve[0].held_out - 0.3


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    first, second, other = (_fit(steps=2, seed=seed)[0] for seed in (0, 0, 1))
    weights = first.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in second.state_dict().items())
    assert any(not torch.equal(weights[k], v) for k, v in other.state_dict().items())


def test_dropout_leaves_no_trace_in_the_fitted_model() -> None:
    model, _ = _fit(dropout=0.5)
    model.train()
    inputs = torch.arange(4, 24)[None]
    assert torch.equal(fit._logits(model, inputs), fit._logits(model, inputs))


def test_a_run_that_lags_ends_annealed_within_its_budget() -> None:
    _, result = _fit(steps=10**9, budget_s=0.8, eval_every_steps=10**9)
    assert result.wall_s < 60.0, "all of the steps take days"
    assert len(result.curve) == 1


def test_steps_alone_drive_the_schedule_until_half_time() -> None:
    assert fit.progress_of(0.1, 0.49) == 0.1
    assert fit.progress_of(0.1, 0.6) == 0.6
    assert fit.progress_of(0.7, 0.6) == 0.7


def test_learning_rate_warms_up_and_is_annealed() -> None:
    fractions = [fit.lr_fraction(i / 100) for i in range(101)]
    assert fractions[0] < 0.1
    assert max(fractions) == pytest.approx(1.0)
    assert fractions[-1] == pytest.approx(0.02)
    assert fractions[4:] == sorted(fractions[4:], reverse=True)


def test_the_last_point_near_the_lowest_loss_is_chosen() -> None:
    curve = [fit.CurvePoint(i, 0.0, 0.0, loss) for i, loss in enumerate([3.0, 2.0, 2.03, 2.1])]
    assert fit.choose(curve).step == 2


def test_a_draft_equal_to_its_teacher_has_no_divergence_and_full_agreement() -> None:
    model = fit.build_model(_TINY, seed=0)
    inputs = torch.arange(4, 24)[None]
    logits = fit._logits(model.eval(), inputs)
    loss = fit.distillation_loss(model, hard_share=0.0)(inputs, logits, inputs)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    agreement = fit.agreement(model, model, inputs)
    assert agreement.greedy == 1.0
    assert agreement.sampled == pytest.approx(1.0, abs=1e-5)


def test_shapes_of_the_two_models_are_the_size_they_claim() -> None:
    for shape, low, high in (
        (train.TARGET_SHAPE, 6e6, 7.5e6),
        (train.DRAFT_SHAPE, 0.8e6, 1.2e6),
    ):
        num_parameters = sum(p.numel() for p in fit.build_model(shape, 0).parameters())
        assert low <= num_parameters <= high


@pytest.mark.slow
def test_the_whole_command_runs_on_a_few_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "TARGET_SHAPE", _TINY)
    monkeypatch.setattr(train, "DRAFT_SHAPE", _TINY)
    library = tmp_path / "Lib"
    library.mkdir()
    for module in ("argparse", "codecs", "inspect", "tempfile"):
        source = Path(__import__("sysconfig").get_paths()["stdlib"]) / f"{module}.py"
        (library / source.name).write_bytes(source.read_bytes())
    train.main(
        ["--out", str(tmp_path / "out"), "--stdlib", str(library), "--device", "cpu"]
        + ["--steps", "2", "--draft-steps", "2"]
    )
    report = (tmp_path / "out" / "training_report.json").read_text()
    assert '"unigram_nats_per_token"' in report
    for name in ("target", "draft"):
        assert (tmp_path / "out" / name / "model.safetensors").is_file()
