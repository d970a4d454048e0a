"""`python tests/clients/lm_eval_scores.py http://127.0.0.1:8000`: lm-eval on tasks of this folder.

Log likelihoods are those that Transformers gives for the same weights, so scores are too.
"""

import os
import sys
import tempfile
from pathlib import Path

import lm_eval
import pytest
import torch
from asked import MODEL
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.builtin import builtin_model_path

HERE = Path(__file__).parent


def evaluate(model, task, arguments, **more):
    manager = TaskManager(include_path=str(HERE / "lm_eval_tasks"), include_defaults=False)
    arguments = {"model": MODEL, "num_concurrent": 2, "max_retries": 1, **arguments}
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=manager,
        bootstrap_iters=0,
        **more,
    )


def check_choices(url):
    """Both ways of asking: token ids (the default) and texts."""
    folder = str(builtin_model_path())
    truth = likelihoods(folder)
    for tokenized in (True, False):
        result = evaluate(
            "local-completions",
            "tessera_choice",
            {
                "base_url": f"{url}/v1/completions",
                "tokenizer": folder,
                "tokenized_requests": tokenized,
            },
        )
        for sample in result["samples"]["tessera_choice"]:
            found = [one[0][0] for one in sample["resps"]]
            doc = sample["doc"]
            wanted = [truth(doc["prompt"], choice) for choice in doc["choices"]]
            assert found == pytest.approx(wanted, abs=2e-3)
            assert sample["acc"] == (wanted.index(max(wanted)) == doc["label"])


def likelihoods(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def likelihood(prompt, continuation):
        whole, start = tokenizer.encode(prompt + continuation), len(tokenizer.encode(prompt))
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(logprobs[i - 1, whole[i]].item() for i in range(start, len(whole)))

    return likelihood


def check_answers(url):
    result = evaluate(
        "local-chat-completions",
        "tessera_answer",
        {"base_url": f"{url}/v1/chat/completions"},
        apply_chat_template=True,
    )
    assert result["results"]["tessera_answer"]["exact_match,none"] == 1.0


def main(url):
    os.chdir(HERE)  # where the tasks say that their data lie
    check_choices(url)
    check_answers(url)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1"}
        main(sys.argv[1])
