"""Values that conversations about functions and JSON are filled with, held-out ones apart.

Knows kinds of values ("city", "integer", "one of celsius|fahrenheit") and their JSON types. A word
is held out by a hash of itself alone, so a name that tests the model was never shown to it.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workers.builtin.corpus import is_held_out

Value = str | int | float | bool | list[str]

_CITIES = """Paris, London, Tokyo, Rome, Berlin, Madrid, Oslo, Vienna, Lisbon, Dublin, Athens,
Cairo, Nairobi, Lagos, Accra, Tunis, Rabat, Delhi, Mumbai, Lahore, Dhaka, Hanoi, Seoul, Osaka,
Kyoto, Taipei, Manila, Jakarta, Sydney, Perth, Auckland, Lima, Quito, Bogota, Santiago, Caracas,
Havana, Toronto, Montreal, Boston, Chicago, Denver, Dallas, Austin, Seattle, Miami, Atlanta,
Houston, Phoenix, New York, San Francisco, Los Angeles, Rio de Janeiro, Buenos Aires, Mexico City,
Cape Town, Tel Aviv, Hong Kong, Warsaw, Prague, Budapest, Bucharest, Sofia, Belgrade, Zagreb,
Helsinki, Stockholm, Copenhagen, Riga, Tallinn, Vilnius, Kyiv, Ankara, Istanbul, Baghdad, Tehran,
Riyadh, Doha, Dubai, Muscat, Kabul, Karachi, Milan, Naples, Turin, Venice, Florence, Lyon, Nice,
Lille, Bordeaux, Nantes, Hamburg, Munich, Cologne, Bremen, Leipzig, Zurich, Geneva, Basel, Bern,
Brussels, Antwerp, Ghent, Utrecht, Rotterdam, Leeds, Bristol, Cardiff, Glasgow, Edinburgh, Belfast,
Cork, Porto, Seville, Valencia, Bilbao, Granada"""
_PEOPLE = """Ada, Alan, Grace, Linus, Guido, Barbara, Edsger, Donald, Margaret, Ken, Dennis, Brian,
Anna, Ben, Carla, David, Emma, Felix, Greta, Hugo, Ines, Jonas, Karin, Leo, Maria, Nils, Olga, Paul,
Quentin, Rosa, Simon, Tara, Umar, Vera, Walter, Xenia, Yusuf, Zoe, Alice, Bob, Carol, Dave, Erin,
Frank, Heidi, Ivan, Judy, Mallory, Oscar, Peggy, Sybil, Trent, Victor, Wendy, Ahmed, Bianca, Chen,
Deepa, Elif, Farid, Gita, Hana, Igor, Jamal, Kenji, Lena, Mei, Noor, Omar, Priya, Ravi, Sana, Tomas,
Jason, Sarah, John, Mary, Peter, Laura, Mark, Julia, Kevin, Nina, Sam, Lucy, Max, Ella, Tim, Eva"""
NOUNS = """account, album, alarm, animal, answer, apple, archive, article, badge, bag, ball, basket,
battery, beacon, bicycle, bill, bird, blanket, boat, bottle, box, bridge, budget, bus, button,
cabin, cable, cake, camera, candle, car, card, carpet, castle, cat, chair, chart, clock, cloud,
coat, coffee, coin, contract, cookie, course, crate, cup, customer, desk, device, dog, door, drawer,
dress, drone, engine, envelope, farm, fence, field, film, flag, flower, folder, forest, fountain,
game, garage, garden, gate, gift, glass, guest, guitar, hammer, harbor, hat, hotel, house, invoice,
island, jacket, job, journey, key, kitchen, ladder, lamp, lake, lease, lesson, letter, library,
licence, lion, lock, machine, magazine, map, market, meal, medal, meeting, menu, mirror, monitor,
mountain, museum, needle, newspaper, note, orchard, order, oven, painting, parcel, park, passport,
patient, pencil, phone, photo, piano, picture, pillow, pipe, planet, plate, player, playlist, poem,
pool, printer, prize, project, pump, puzzle, queue, radio, receipt, recipe, refund, report, ring,
river, road, robot, room, rope, route, salary, school, screen, sensor, server, shelf, ship, shoe,
shop, sofa, song, spoon, stamp, statue, station, stone, student, subscription, suitcase, survey,
table, tank, team, tent, ticket, toy, tractor, train, tree, truck, tunnel, turbine, umbrella, valve,
vase, village, violin, visa, voucher, wagon, wallet, warehouse, watch, window, wire, workshop,
zebra"""
_LANGUAGES = """French, German, Spanish, Italian, Polish, Dutch, Greek, Turkish, Arabic, Hindi,
Japanese, Korean, Chinese, Swedish, Danish, Finnish, Czech, Portuguese, Russian, English"""
_COLOURS = "red, green, blue, yellow, black, white, orange, purple, pink, brown, grey, silver"
_SYLLABLES = """ba be bo da de do fa fe fi ga go gu ha he hi jo ka ke ki la le lo lu ma me mi mo na
ne no nu pa pe po ra re ri ro ru sa se si so ta te ti to tu va ve vi wa we xa ya yo za ze zo bran
cor dal fen gar hol kel lin mar nor pel quin ras sel tan ul ven wil yor zan ber den fer gol han kir
lor min nel per ros sten tor van wen ing ard eth ion ost ula ash"""
_MAILS = ("example.com", "example.org", "mail.test", "post.example")
_FILES = ("txt", "csv", "md", "json", "log", "pdf", "py")
_WORD = re.compile(r"(?<![\w.])[a-z]{3,11}(?![\w.(])")
_MIN_WORD_COUNT = 8

_JSON_TYPES = {"integer": "integer", "number": "number", "boolean": "boolean"}


def listed(text: str) -> list[str]:
    """The entries between commas."""
    return re.split(r",\s+", text.strip())


def words_of(texts: Iterable[str]) -> list[str]:
    """Lower-case words that the texts use often, in a fixed order."""
    counts = Counter(word for text in texts for word in _WORD.findall(text))
    return sorted(word for word, count in counts.items() if count >= _MIN_WORD_COUNT)


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON schema of values of this kind."""
    if kind == "list":
        return {"type": "array", "items": {"type": "string"}}
    if kind.startswith("one of "):
        return {"type": "string", "enum": choices(kind)}
    return {"type": _JSON_TYPES.get(kind, "string")}


def choices(kind: str) -> list[str]:
    return kind.removeprefix("one of ").split("|")


def spoken(value: Value) -> str:
    """How a sentence says the value."""
    match value:
        case bool():
            return "true" if value else "false"
        case list():
            return ", ".join(value[:-1]) + f" and {value[-1]}"
        case _:
            return str(value)


class Lexicon:
    """Random values, of words that are all held out or none of them."""

    def __init__(self, rng: random.Random, words: Sequence[str], *, held_out: bool) -> None:
        self._rng = rng
        self._held_out = held_out
        self._cities = self._own(listed(_CITIES))
        self._people = self._own(listed(_PEOPLE))
        self._nouns = self._own(listed(NOUNS))
        self._words = self._own(words)
        self._syllables = _SYLLABLES.split()
        self._kinds: dict[str, Callable[[], Value]] = {
            "city": self._city,
            "person": self._person,
            "noun": self.noun,
            "word": self.word,
            "phrase": self._phrase,
            "language": lambda: rng.choice(listed(_LANGUAGES)),
            "colour": lambda: rng.choice(listed(_COLOURS)),
            "integer": self._integer,
            "number": lambda: round(rng.uniform(0, 10 ** rng.randint(1, 3)), rng.randint(1, 2)),
            "boolean": lambda: rng.random() < 0.5,
            "date": self._date,
            "time": lambda: f"{rng.randrange(24):02d}:{5 * rng.randrange(12):02d}",
            "email": lambda: f"{self._person().lower()}@{rng.choice(_MAILS)}".replace(" ", "."),
            "file": lambda: f"{self.word()}.{rng.choice(_FILES)}",
            "code": self._code,
            "sum": self._sum,
            "list": self._list,
        }

    def value(self, kind: str) -> Value:
        """A value of the kind. Raises KeyError for one that there is not."""
        if kind.startswith("one of "):
            return self._rng.choice(choices(kind))
        return self._kinds[kind]()

    def noun(self) -> str:
        return self._rng.choice(self._nouns if self._rng.random() < 0.6 else self._words)

    def word(self) -> str:
        return self._rng.choice(self._words) if self._rng.random() < 0.7 else self.invented()

    def invented(self) -> str:
        """A lower-case word of syllables, on this lexicon's side of the split."""
        while True:
            word = "".join(self._rng.choices(self._syllables, k=self._rng.randint(2, 3)))
            if self._is_own(word):
                return word

    def _own(self, words: Sequence[str]) -> list[str]:
        return [word for word in words if self._is_own(word)]

    def _is_own(self, word: str) -> bool:
        return is_held_out(f"word:{word.lower()}") is self._held_out

    def _name(self, known: Sequence[str]) -> str:
        chance = self._rng.random()
        if chance < 0.5:
            return self._rng.choice(known)
        return (self.invented() if chance < 0.85 else self._rng.choice(self._words)).capitalize()

    def _city(self) -> str:
        return self._name(self._cities)

    def _person(self) -> str:
        name = self._name(self._people)
        return f"{name} {self.invented().capitalize()}" if self._rng.random() < 0.2 else name

    def _phrase(self) -> str:
        phrase = " ".join(self.word() for _ in range(self._rng.randint(2, 5)))
        return phrase.capitalize() if self._rng.random() < 0.3 else phrase

    def _integer(self) -> int:
        return self._rng.randrange(10 ** self._rng.randint(1, 4))

    def _date(self) -> str:
        rng = self._rng
        return f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"

    def _code(self) -> str:
        letters = "".join(self._rng.choices("ABCDEFGHJKLMNPRSTUVWXYZ", k=self._rng.randint(1, 3)))
        return f"{letters}{self._rng.choice(('', '-'))}{self._rng.randrange(10, 9999)}"

    def _sum(self) -> str:
        terms = [str(self._integer()) for _ in range(self._rng.randint(2, 3))]
        return f" {self._rng.choice('+-*/')} ".join(terms)

    def _list(self) -> list[str]:
        kind = self._rng.choice(("noun", "person", "city", "word"))
        return [str(self.value(kind)) for _ in range(self._rng.randint(2, 4))]
