"""`afferent.Features` with two confined workers; the program gets the processor's own floats."""

from collections.abc import Sequence

from afferent import Features, ItemFeatures


def main(model: str, paths: Sequence[str]) -> int:
    with Features(model, where="pool", num_workers=2) as features:
        made = features.make_many(paths, form="hf")
        return sum(len(each["pixel_values"]) for each in made if isinstance(each, ItemFeatures))
