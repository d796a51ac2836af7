"""`afferent.Features` with two confined workers; features stay in the store."""

from collections.abc import Sequence

from afferent import Features, SharedItem


def main(model: str, paths: Sequence[str]) -> int:
    with Features(model, where="pool", num_workers=2) as features:
        made = features.share_many(paths)
        return sum(isinstance(each, SharedItem) for each in made)
