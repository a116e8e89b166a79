"""The words of the embedded example databases: entities, attributes and value pools by domain.

Every identifier is one lower-case word that is no SQL keyword, every value one capitalised word, so
that a word-level tokenizer gives each a single token and a small model can learn to copy them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Domain:
    """One field of life.

    `entities` are table names from the general to the particular: an earlier one can be the parent
    of a later one. `names` is the pool that unique names come from; `categories` and `numbers` are
    the column words special to the domain, `dates` its date columns.
    """

    name: str
    names: str
    entities: tuple[str, ...]
    categories: tuple[str, ...]
    numbers: tuple[str, ...]
    dates: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAME_POOLS: dict[str, tuple[str, ...]] = {
    "person": _words(
        "Anna Bruno Carla David Elena Felix Greta Henry Irene Jonas Karin Lucas Maria Nadia Oscar "
        "Paula Quinn Rosa Simon Tessa Ulrich Vera Walter Yusuf"
    ),
    "place": _words(
        "Alton Bergen Cordova Dover Elgin Fargo Galway Hobart Ithaca Juneau Kiruna Lugano Malmo "
        "Nantes Odessa Perth Quito Riga Salem Tulsa Utrecht Verona Windsor York"
    ),
    "thing": _words(
        "Apollo Breeze Comet Delta Echo Falcon Gemini Harbor Indigo Jasper Kestrel Lotus Meteor "
        "Nova Orbit Phoenix Quartz Rapid Saturn Titan Unity Vortex Willow Zenith"
    ),
}

VALUE_POOLS: dict[str, tuple[str, ...]] = {
    "color": _words("Red Blue Green Yellow Black White Orange Purple Brown Gray Pink Violet"),
    "country": _words(
        "France Germany Italy Spain Japan Brazil Canada Mexico Kenya India Norway Chile"
    ),
    "region": _words(
        "North South East West Central Coastal Inland Alpine Valley Island Delta Rural"
    ),
    "status": _words(
        "Active Closed Pending Draft Expired Frozen Paused Ready Sold Blocked Planned Retired"
    ),
    "material": _words(
        "Wood Steel Glass Paper Cotton Leather Stone Copper Plastic Silver Wool Clay"
    ),
    "brand": _words("Acme Bolt Crest Dyna Ergo Flux Gama Helio Ionic Juno Karma Lumen"),
    "shape": _words(
        "Round Square Oval Flat Curved Narrow Wide Hollow Conical Spiral Twisted Sharp"
    ),
    "season": _words(
        "Spring Summer Autumn Winter Monsoon Harvest Holiday Easter Lent Advent Solstice Dry"
    ),
    "weather": _words("Sunny Cloudy Rainy Windy Foggy Snowy Stormy Humid Frosty Misty Hazy Clear"),
    "language": _words(
        "English French German Spanish Italian Dutch Swedish Polish Greek Turkish Arabic Korean"
    ),
    "genre": _words("Jazz Rock Blues Opera Folk Soul Disco Metal Reggae Tango Techno Gospel"),
    "flavor": _words(
        "Vanilla Lemon Cherry Mint Ginger Mango Peach Coffee Honey Almond Apple Coconut"
    ),
    "animal": _words("Horse Sheep Goat Donkey Rabbit Duck Goose Turkey Llama Camel Ostrich Bison"),
    "crop": _words(
        "Wheat Barley Maize Rice Oats Potato Tomato Carrot Onion Cabbage Pumpkin Lentil"
    ),
    "sport": _words(
        "Tennis Soccer Hockey Rugby Golf Boxing Rowing Cycling Fencing Judo Sailing Archery"
    ),
    "role": _words(
        "Manager Clerk Director Analyst Driver Guard Intern Trainer Editor Planner Cook Nurse"
    ),
    "subject": _words(
        "Algebra Biology Physics History Latin Drama Music Poetry Logic Ethics Botany Geology"
    ),
    "illness": _words(
        "Asthma Fever Cough Allergy Anemia Flu Gout Measles Migraine Malaria Rash Sprain"
    ),
    "fuel": _words(
        "Diesel Petrol Electric Hybrid Hydrogen Ethanol Methane Coal Solar Steam Kerosene Propane"
    ),
    "instrument": _words(
        "Piano Violin Guitar Flute Trumpet Drums Harp Cello Clarinet Organ Banjo Oboe"
    ),
    "epoch": _words(
        "Roman Baroque Gothic Modern Bronze Stone Medieval Classic Rococo Tudor Viking Aztec"
    ),
    "planet": _words(
        "Mercury Venus Earth Mars Jupiter Neptune Pluto Ceres Eris Vesta Pallas Haumea"
    ),
    "element": _words("Fire Water Wind Ice Thunder Shadow Light Poison Crystal Iron Sand Spirit"),
    "payment": _words(
        "Cash Card Check Voucher Transfer Invoice Credit Coupon Token Wallet Loan Barter"
    ),
    "grade": _words(
        "Gold Platinum Basic Premium Standard Deluxe Economy Junior Senior Expert Novice Elite"
    ),
    "mood": _words("Happy Calm Angry Sad Bored Proud Tired Eager Brave Nervous Gentle Jolly"),
}

# Category column word -> the pool its values come from.
CATEGORIES: dict[str, str] = {
    "color": "color", "paint": "color", "country": "country", "origin": "country",
    "region": "region", "district": "region", "status": "status", "state": "status",
    "material": "material", "fabric": "material", "brand": "brand", "maker": "brand",
    "shape": "shape", "season": "season", "climate": "weather", "weather": "weather",
    "language": "language", "genre": "genre", "flavor": "flavor", "breed": "animal",
    "crop": "crop", "sport": "sport", "role": "role", "job": "role", "subject": "subject",
    "topic": "subject", "illness": "illness", "symptom": "illness", "fuel": "fuel",
    "engine": "fuel", "instrument": "instrument", "epoch": "epoch", "style": "epoch",
    "planet": "planet", "element": "element", "payment": "payment", "method": "payment",
    "grade": "grade", "tier": "grade", "mood": "mood",
}  # fmt: skip

GENERAL_CATEGORIES = _words("color country region status brand grade mood shape tier origin")
GENERAL_NUMBERS = _words(
    "price cost weight height width depth age score rating rank size level amount points power "
    "value"
)
GENERAL_DATES = _words("created opened started closed")
LABELS = _words("name name name name title label")  # the usual one several times as often
MODIFIERS = _words("unit net gross base daily annual yearly extra main local minor spare")

DOMAINS: tuple[Domain, ...] = (
    Domain(
        "retail", "thing",
        _words("shop supplier warehouse shelf product parcel receipt refund"),
        _words("material payment fabric maker flavor"),
        _words("stock discount quantity profit tax margin"),
        _words("delivered ordered"),
    ),
    Domain(
        "education", "person",
        _words("school faculty teacher course lesson student exam essay"),
        _words("subject language topic role"),
        _words("credits hours absences pages marks seats"),
        _words("enrolled graduated"),
    ),
    Domain(
        "medicine", "person",
        _words("hospital ward doctor nurse patient visit therapy drug"),
        _words("illness symptom role language"),
        _words("beds doses pulse shifts fee recoveries"),
        _words("admitted discharged"),
    ),
    Domain(
        "publishing", "person",
        _words("library publisher author novel chapter reader loan review"),
        _words("genre language topic epoch"),
        _words("copies pages words likes editions fines"),
        _words("published borrowed"),
    ),
    Domain(
        "sports", "person",
        _words("league stadium club coach player fixture medal injury"),
        _words("sport role weather"),
        _words("goals wins losses fouls laps capacity"),
        _words("founded signed"),
    ),
    Domain(
        "farming", "place",
        _words("estate farm barn field harvest animal tractor market"),
        _words("crop breed climate fuel season"),
        _words("acres eggs yield calves rainfall litres"),
        _words("planted harvested"),
    ),
    Domain(
        "transport", "place",
        _words("airport airline depot route vehicle driver trip ticket"),
        _words("fuel engine paint weather method"),
        _words("speed distance wheels stops passengers delay"),
        _words("departed serviced"),
    ),
    Domain(
        "music", "thing",
        _words("producer studio band singer album song concert playlist"),
        _words("genre instrument language mood"),
        _words("plays minutes tracks fans tempo volume"),
        _words("released recorded"),
    ),
    Domain(
        "museums", "place",
        _words("museum gallery curator artist painting statue exhibit guide"),
        _words("epoch style material language"),
        _words("visitors rooms frames donations area length"),
        _words("acquired restored"),
    ),
    Domain(
        "geography", "place",
        _words("continent province city suburb street bridge river park"),
        _words("climate language district season"),
        _words("population altitude floors benches lanes span"),
        _words("surveyed built"),
    ),
    Domain(
        "business", "person",
        _words("company office department employee project client contract meeting"),
        _words("role job state method"),
        _words("salary budget bonus revenue debt workers"),
        _words("hired promoted"),
    ),
    Domain(
        "games", "thing",
        _words("galaxy realm guild hero quest weapon spell potion"),
        _words("element planet mood material"),
        _words("coins damage armor lives mana moons"),
        _words("joined defeated"),
    ),
)  # fmt: skip


def entities() -> tuple[str, ...]:
    """Every table word, in a fixed order."""
    return tuple(word for domain in DOMAINS for word in domain.entities)


def attributes() -> tuple[str, ...]:
    """Every column word (labels, categories, numbers, dates), sorted."""
    words = {*LABELS, *CATEGORIES, *GENERAL_NUMBERS, *GENERAL_DATES}
    for domain in DOMAINS:
        words.update(domain.categories, domain.numbers, domain.dates)
    return tuple(sorted(words))
