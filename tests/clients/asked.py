"""What the programs of this folder ask: one model, one function, one record."""

from pydantic import BaseModel, Field

MODEL = "builtin"
FACTS = "Ada is 36 years old and lives in London."
WEATHER_QUESTION = "What is the weather in Paris?"
CODE_QUESTION = "What does os.path.join do?"


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=20)


ADA = Person(name="Ada", age=36, city="London")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
