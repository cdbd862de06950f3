"""Which form attention to a shared prefix takes: on its states (EL-attention) or on K and V built from them."""

from collections.abc import Callable
from dataclasses import dataclass

from fairseq_el.models.costs import Machine, Shape


@dataclass
class PolicyState:
    """The policy's view of one batch."""

    expected_steps: float = 0.0
    steps: int = 0
    rent_paid: float = 0.0


@dataclass(frozen=True)
class AttentionPolicy:
    """Chooses the form anew at every step.

    Ski rental: attending to states is renting, building K and V is buying. `auto` buys once renting for the steps
    still expected would cost more than the price, or once the rent paid has reached the price. The latter bounds the
    regret for any output length.
    """

    form: str = "auto"  # or `always` (states, as in the paper) or `never` (K and V, shared by the beams)
    budget: int | None = None  # bytes for all state that one model keeps of a batch; None for no limit

    def prefers_key_values(self, shape: Shape, machine: Callable[[], Machine]) -> bool:
        """Whether K and V are worth their memory where building them is free, as in prefill."""
        if self.form != "auto":
            return self.form == "never"
        return machine().el_step(shape) > machine().multi_head_step(shape)

    def wants_key_values(self, shape: Shape, machine: Callable[[], Machine], state: PolicyState) -> bool:
        """Whether to build K and V now. Measures the machine only if the answer depends on it."""
        if self.form != "auto":
            return self.form == "never"
        rent = machine().el_step(shape) - machine().multi_head_step(shape)
        if rent <= 0:
            return False
        price = machine().build(shape)
        remaining = state.expected_steps - state.steps
        state.steps += 1
        state.rent_paid += rent
        return rent * remaining >= price or state.rent_paid >= price
