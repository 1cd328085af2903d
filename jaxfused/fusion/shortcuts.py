"""Has a convolution's dgrad add the gradient of the other operation that reads the convolution's input.

The input of a residual block is read by its first convolution and by its shortcut. Their gradients meet
at that input, where XLA adds them in a pass over memory. If the convolution returns its input and the
shortcut reads what it returns, the dgrad kernel adds both; and where the input is a batch norm's relu,
the kernel masks the sum too.
"""

import functools
from collections.abc import Iterable
from dataclasses import replace

from jaxfused.fusion.graph import Value
from jaxfused.fusion.recognisers.conv import Convolution
from jaxfused.fusion.recognisers.image_norm import Match
from jaxfused.fusion.site import Site


def joined(sites: Iterable[Site]) -> list[Site]:
    """Returns the replacements, with convolutions that return their input to its other reader.

    `sites` are in the order in which they run. A site that reads what an earlier one returns still has
    its place in that order.
    """
    found = {site: site for site in sites}
    readers: dict[Value, list[Site]] = {}
    for site in found:
        for value in dict.fromkeys(site.inputs):
            readers.setdefault(value, []).append(site)
    owner = {node: site for site in found for node in site.covered}
    makers = {site.outputs[0]: site for site in found}
    for value, both in readers.items():
        if len(both) != 2 or value.is_output or not value.is_floating:
            continue
        conv, other = both
        if any(owner.get(node) not in both for node in value.uses) or not _returns(conv, value):
            continue
        maker = makers.get(value)
        again, is_rectified = Value(value.aval), False
        if maker is not None and _is_relu_of_batch_norm(maker):
            found[maker], is_rectified = _without_mask(found[maker]), True
        found[conv] = _returning(found[conv], again, is_rectified=is_rectified)
        inputs = [again if read is value else read for read in found[other].inputs]
        found[other] = replace(found[other], inputs=inputs)
    return list(found.values())


def _returns(site: Site, value: Value) -> bool:
    """Returns whether a site is a convolution of `value` that can return it."""
    facts = site.facts
    of_one = isinstance(facts, Convolution) and facts.reads_one
    return of_one and site.inputs[0] is value and list(site.inputs).count(value) == 1


def _is_relu_of_batch_norm(site: Site) -> bool:
    norm = site.facts.norm if isinstance(site.facts, Convolution) else site.facts
    return isinstance(norm, Match) and norm.arrangement.is_of_batch and norm.activation == "relu"


def _without_mask(site: Site) -> Site:
    """Returns a batch norm's site whose readers apply relu's mask to the gradient."""
    return replace(site, call=functools.partial(site.call, mask_gradient=False))


def _returning(site: Site, again: Value, *, is_rectified: bool) -> Site:
    """Returns a convolution's site with its input `again` as its last result."""
    call = functools.partial(site.call, return_input=True, is_rectified=is_rectified)
    return replace(site, outputs=[*site.outputs, again], call=call)
