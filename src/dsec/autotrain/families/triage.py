"""Incident triage: `i.s<40?x:i.r>`: severity, a comparison, and the owner when it is not small. Held out of everything that is trained."""

from __future__ import annotations

from random import Random

from dsec.autotrain.families.task import Task
from dsec.autotrain.families.tools import LETTERS, TO_NUMBER, TO_PERSON, arithmetic, look_up

TOOLS = ("compare", "look_up")
LEVELS = {1: (50, 70), 2: (20, 70), 3: (10, 40)}  # threshold: the higher, the fewer incidents need their owner


def draw(random: Random, level: int) -> Task:
    """One task."""
    facts, limit = random.getrandbits(30), random.randint(*LEVELS[level])
    incident, queue = random.choice(LETTERS), random.choice(LETTERS)
    severity, owner = random.choice(TO_NUMBER), random.choice(TO_PERSON)
    value = look_up(facts, incident, severity)
    calls = [f"{incident}.{severity}", f"{value}<{limit}"]
    answer = queue
    if arithmetic(int(value), "<", limit) == "n":
        calls.append(f"{incident}.{owner}")
        answer = look_up(facts, incident, owner)
    prompt = (
        f"Incident {incident}: if its relation {severity} (severity) is below {limit}, it goes to queue {queue}, "
        f"otherwise to whomever its relation {owner} (owner) leads to. Where does it go?"
    )
    return Task("triage", prompt, f"{incident}.{severity}<{limit}?{queue}:{incident}.{owner}>", answer, facts, tuple(calls))
