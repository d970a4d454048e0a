"""A rank on a CPU whose results do not depend on what shares a step: it takes token by token."""

from workers.runner.model_runner import ModelRunner
from workers.runner.step_pieces import ReadableStep, launch_by_tokens
from workers.scheduler.plan import StepPlan


class TokenByTokenRunner(ModelRunner):
    """Every new token is a step of its own, a decode step of one row (decision 0111).

    What libraries do with a matrix depends on its shape; the shapes of a token's step depend on its
    position alone. Weights are read once a token: prompts take as long a token as output does.
    """

    def _launch(self, plan: StepPlan) -> ReadableStep:
        return launch_by_tokens(plan, super()._launch)
