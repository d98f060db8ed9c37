"""All verbs: what a transition needs, bound to its script, and what its answer means.

Inputs are valid here (`queues.services` checks them). A batch is the base case: every verb on tasks takes 1..1,000
of them, and answers in their order with a value or an error each.
"""

from __future__ import annotations

from queues.engine.dead import DeadLetters
from queues.engine.governing import Governing
from queues.engine.producing import Producing
from queues.engine.ranked import Ranked
from queues.engine.reading import Reading
from queues.engine.repairing import Repairing
from queues.engine.working import Working


class Engine(Producing, Working, Repairing, DeadLetters, Governing, Reading, Ranked):
    """The verbs of one installation's queues."""
