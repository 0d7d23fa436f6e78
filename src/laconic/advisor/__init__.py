"""The advisor: measure training and the network, and predict which recipe is worthwhile."""

from laconic.advisor.advice import advice_on
from laconic.advisor.advise import advise
from laconic.advisor.show import Advice, Row

__all__ = ["Advice", "Row", "advice_on", "advise"]
