"""`python tests/clients/instructor_models.py http://127.0.0.1:8000`: Instructor in four modes."""

import sys

import instructor
from asked import ADA, FACTS, MODEL, Person
from openai import OpenAI

MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
)


def check_mode(openai, mode):
    client = instructor.from_openai(openai, mode=mode)
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    messages = [{"role": "user", "content": f"Extract: {FACTS}"}]
    found, completion = client.create_with_completion(
        messages=messages, response_model=Person, **asked
    )
    assert found.model_dump() == ADA.model_dump(), mode  # of a class made by Instructor
    assert completion.usage.completion_tokens > 1
    *_, last = client.create_partial(messages=messages, response_model=Person, **asked)
    assert last.model_dump() == ADA.model_dump(), mode


def main(url):
    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    for mode in MODES:
        check_mode(openai, mode)


if __name__ == "__main__":
    main(sys.argv[1])
