"""The advisor: measure training and the network, and predict which recipe is worthwhile."""

from laconic.advisor.advice import Advice, Guide, Row, advice_on
from laconic.advisor.advise import advise

__all__ = ["Advice", "Guide", "Row", "advice_on", "advise"]
