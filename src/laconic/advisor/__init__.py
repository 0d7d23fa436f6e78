"""The advisor: measures a training and its network, and says which recipe will pay."""

from laconic.advisor.advice import Advice, Guide, Row, advice_on
from laconic.advisor.advise import advise

__all__ = ["Advice", "Guide", "Row", "advice_on", "advise"]
