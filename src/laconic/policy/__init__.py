"""What `laconic.auto` and `laconic advise` share: a cost model, candidates, and the choice."""
