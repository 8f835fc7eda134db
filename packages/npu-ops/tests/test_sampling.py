from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import npu_ops

INFINITY = float("inf")
definitions = npu_ops.definitions.sampling
reference = definitions.top_k_top_p.reference


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 100), (1, 151936), (5, 32000)])
def test_argmax(ops, isa, device, dtype, shape):
    logits = torch.randn(shape).to(dtype)
    best = logits.float().amax(-1, keepdim=True)
    first = (logits.float() == best).int().argmax(-1)
    assert torch.equal(ops.argmax(logits.to(device)).cpu(), first)


@pytest.mark.parametrize("where", [0, 17, 4095, 4096, 9999])
def test_first_of_equal_maxima_and_nan(ops, isa, dtype, where):
    logits = torch.zeros(2, 10000, dtype=dtype)
    logits[0, where:] = 5
    logits[1, where] = float("nan")
    logits[1, 3] = INFINITY
    assert ops.argmax(logits).tolist() == [where, where]


def test_all_minus_infinity_takes_the_first(ops, isa):
    assert ops.argmax(torch.full((2, 5000), -INFINITY)).tolist() == [0, 0]


def kept_mass_is_right(before, after, p):
    """The kept set is a nucleus: dropping its least member would leave less than p, up to rounding."""
    probs = before.double().softmax(-1)
    kept = after > -INFINITY
    mass = (probs * kept).sum(-1)
    least = torch.where(kept, probs, 9.0).amin(-1)
    assert (mass >= p - 1e-5).all()
    assert (mass - least <= p + 1e-5).all()


@pytest.mark.parametrize("width", [5, 100, 32000, 151936])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_top_p_keeps_a_nucleus(ops, isa, device, width, rows, spread):
    logits, p = torch.randn(rows, width) * spread, torch.rand(rows) * 0.9 + 0.05
    out = logits.to(device, copy=True)
    ops.top_k_top_p(out, None, p.to(device))
    out = out.cpu()
    kept = out > -INFINITY
    assert torch.equal(out[kept], logits[kept])
    kept_mass_is_right(logits, out, p)
    # whatever stays is not below whatever goes
    assert (torch.where(kept, logits, INFINITY).amin(-1) >= torch.where(kept, -INFINITY, logits).amax(-1)).all()


@pytest.mark.parametrize("sampled", [0.0, -3.0])
@pytest.mark.parametrize("p", [0.5, 0.9])
def test_top_p_of_logits_that_a_sample_misses(ops, isa, p, sampled):
    """The kernel looks at every 32nd vector first: these are unlike the others."""
    logits = torch.rand(3, 40001) * 0.01
    width = 8 if isa in ("scalar", "avx2") else 16
    logits += torch.where(torch.arange(40001) % (32 * width) < width, sampled, -3.0 - sampled)
    out = logits.clone()
    ops.top_k_top_p(out, None, torch.full((3,), p))
    kept_mass_is_right(logits, out, p)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_row_is_masked_the_same_whatever_shares_the_batch(ops, isa, device, rows):
    logits, k, p = torch.randn(rows, 50000) * 3, torch.full((rows,), 40), torch.full((rows,), 0.8)
    for ks, ps in ((None, p), (k, None), (k, p)):
        together, alone = logits.to(device, copy=True), logits[-1:].to(device, copy=True)
        ops.top_k_top_p(together, None if ks is None else ks.to(device), None if ps is None else ps.to(device))
        ops.top_k_top_p(alone, None if ks is None else ks[:1].to(device), None if ps is None else ps[:1].to(device))
        assert torch.equal(together[-1], alone[0])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [5, 100, 32000])
def test_top_k_is_exact(ops, isa, device, kind, width):
    logits, k = torch.randn(6, width), torch.randint(1, width + 1, (6,)).to(kind)
    k[0], k[1], k[2] = width, 1, 0
    out, expected = logits.to(device, copy=True), logits.clone()
    ops.top_k_top_p(out, k.to(device), None)
    reference(expected, k, None)
    assert torch.equal(out.cpu(), expected)


def test_logits_equal_to_the_kth_stay(ops, isa):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, -1.0]])
    ops.top_k_top_p(logits, torch.tensor([3]), None)
    assert (logits > -INFINITY).tolist() == [[False, True, True, True, True, True, False, False]]


def test_of_equals_at_the_edge_the_first_go(ops, isa):
    logits = torch.zeros(1, 10)
    ops.top_k_top_p(logits, None, torch.tensor([0.55]))
    assert (logits[0] > -INFINITY).tolist() == [False] * 4 + [True] * 6


@pytest.mark.parametrize("p", [1e-6, 0.3])
def test_the_highest_logit_always_stays(ops, isa, p):
    logits = torch.tensor([[0.0, 9.0, 1.0], [2.0, 2.0, 2.0]])
    ops.top_k_top_p(logits, None, torch.tensor([p, 1e-9]))
    assert (logits > -INFINITY).tolist() == [[False, True, False], [False, False, True]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_small_integers_equal_the_reference(data):
    """Many ties; masses that do not meet the bound exactly."""
    width = data.draw(st.integers(1, 40))
    logits = torch.tensor([data.draw(st.lists(st.integers(-4, 4), min_size=width, max_size=width))]).float()
    k = torch.tensor([data.draw(st.integers(0, width))])
    p = torch.tensor([data.draw(st.floats(0.013, 0.987))])
    expected, out = logits.clone(), logits.clone()
    reference(expected, k, p)
    torch.ops.npu_ops.top_k_top_p(out, k, p)
    if not torch.equal(out, expected):  # a mass may lie within rounding of the bound
        assert (out > -INFINITY).sum() - (expected > -INFINITY).sum() in (-1, 1)
        probs = torch.where(expected > -INFINITY, logits, -INFINITY).double().softmax(-1)
        assert abs(probs[out > -INFINITY].sum() - p.item()) < 1e-1


def test_infinite_losers_and_no_masks(ops, isa):
    logits = torch.tensor([[-INFINITY, 1.0, -INFINITY, 0.5]])
    ops.top_k_top_p(logits, None, torch.tensor([0.99]))
    assert logits.tolist() == [[-INFINITY, 1.0, -INFINITY, 0.5]]
    ops.top_k_top_p(logits, None, None)
    ops.top_k_top_p(logits, torch.tensor([4]), torch.tensor([1.0]))
    assert logits.tolist() == [[-INFINITY, 1.0, -INFINITY, 0.5]]


def test_both_zeros_are_one_logit(ops, isa, device):
    logits = (torch.randn(1, 1023) * 0.02).round() / 2
    assert {float(x).hex() for x in logits[0]} >= {"0x0.0p+0", "-0x0.0p+0"}
    expected, out = logits.clone(), logits.to(device, copy=True)
    reference(expected, None, torch.tensor([0.25]))
    ops.top_k_top_p(out, None, torch.tensor([0.25]).to(device))
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 9001), (1, 151936)])
def test_min_p_equals_vllms_rule(ops, isa, device, shape):
    logits, bound = torch.randn(shape) * 3, torch.rand(shape[0]) * 0.5
    bound[0] = 0.05
    out = logits.to(device, copy=True)
    ops.min_p(out, bound.to(device))
    probs = logits.double().softmax(-1)
    limit = probs.amax(-1, keepdim=True) * bound[:, None]
    clear = (probs / limit - 1).abs() > 1e-5
    assert torch.equal((out.cpu() == -INFINITY)[clear], (probs < limit)[clear])
    kept = out.cpu() > -INFINITY
    assert torch.equal(out.cpu()[kept], logits[kept])


def test_min_p_of_nothing_and_everything(ops, isa):
    logits = torch.tensor([[1.0, 2.0, -INFINITY], [3.0, 3.0, 2.99]])
    ops.min_p(logits, torch.tensor([0.0, 1.0]))
    assert logits.tolist() == [[1.0, 2.0, -INFINITY], [3.0, 3.0, -INFINITY]]


@pytest.mark.parametrize("width", [1, 9, 8192, 20001])
def test_the_choice_inverts_the_distribution(ops, isa, device, width):
    logits = torch.randn(4, width) * 3
    logits[1, ::3] = -INFINITY if width > 1 else 0
    uniform = torch.rand(4, dtype=torch.float64)
    token = ops.random_sample(logits.to(device), uniform.to(device)).cpu()
    mass = logits.double().softmax(-1).cumsum(-1)
    above = mass.gather(1, token[:, None])[:, 0]
    below = torch.nn.functional.pad(mass, (1, 0)).gather(1, token[:, None])[:, 0]
    assert (above >= uniform - 1e-6).all()
    assert (below <= uniform + 1e-6).all()
    assert (logits.gather(1, token[:, None]) > -INFINITY).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("width", [5000, 32000, 50000, 151936])
def test_the_highest_number_draws_what_comes_last(ops, isa, width, scale):
    """What lies after the token has hardly a mass, however the sums of the pieces were rounded."""
    logits, uniform = torch.randn(4, width) * scale, torch.full((4,), 1 - 2**-53, dtype=torch.float64)
    token = ops.random_sample(logits, uniform)
    mass = logits.double().softmax(-1).cumsum(-1)
    assert (mass.gather(1, token[:, None]) > 1 - 1e-6).all()


def test_the_choice_at_the_ends_and_of_odd_rows(ops, isa):
    logits = torch.full((5, 9000), -INFINITY)
    logits[0, 7], logits[0, 8500] = 0.0, 0.0
    logits[1, 7], logits[1, 8500] = 0.0, 0.0
    logits[2, 4] = INFINITY
    logits[3] = float("nan")
    uniform = torch.tensor([0.0, 1 - 2**-53, 0.5, 0.5, 0.5], dtype=torch.float64)
    assert ops.random_sample(logits, uniform).tolist() == [7, 8500, 4, 0, 0]


def test_the_choice_does_not_depend_on_the_batch(ops, isa):
    logits, uniform = torch.randn(6, 20000), torch.rand(6, dtype=torch.float64)
    together = ops.random_sample(logits, uniform)
    alone = torch.cat([ops.random_sample(logits[i : i + 1], uniform[i : i + 1]) for i in range(6)])
    assert torch.equal(together, alone)


def test_frequencies_of_the_choice(ops):
    logits = torch.log(torch.tensor([0.5, 0.0, 0.2, 0.3])).expand(4000, 4).contiguous()
    counts = ops.random_sample(logits, torch.rand(4000, dtype=torch.float64)).bincount(minlength=4)
    assert counts[1] == 0
    torch.testing.assert_close(counts / 4000, logits[0].exp(), atol=0.03, rtol=0)


def hashed(seed: int, position: int, domain: int) -> int:
    """MurmurHash3 (32 bits, x86) as its author's description has it, of the four words."""
    h = domain
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position & 0xFFFFFFFF, 0):
        k = word * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


SEEDS = [0, 1, -1, 2**62 + 12345, -(2**63), 77]


@pytest.mark.parametrize("width", [1, 9, 8193, 20001])
def test_a_seed_and_a_position_give_a_token(ops, isa, device, width):
    """The number at which the distribution is inverted is the hash's."""
    logits, positions = torch.randn(6, width) * 3, torch.tensor([0, 5, 2**31 - 1, 7, 8, 1000])
    requests, temperature = torch.tensor([5, 4, 3, 2, 1, 0]), torch.full((6,), 0.7)
    seeds = torch.tensor(SEEDS)
    token = ops.seeded_sample(*(x.to(device) for x in (logits, requests, temperature, seeds, positions))).cpu()
    drawn = [(SEEDS[request], at) for request, at in zip(requests.tolist(), positions.tolist(), strict=True)]
    bits = [hashed(*each, 0x9E3779B9) << 32 | hashed(*each, 0) for each in drawn]
    uniform = torch.tensor([((each >> 11) + 0.5) * 2.0**-53 for each in bits], dtype=torch.float64)
    assert torch.equal(token, ops.random_sample(logits, uniform))


def test_the_highest_is_taken_without_a_temperature(ops, isa, device):
    logits, requests = torch.randn(4, 9001), torch.tensor([1, -1, 1, 0])
    given = (logits, requests, torch.tensor([1.0, 0.0]), torch.tensor([3, 3]), torch.tensor([1, 2, 3, 4]))
    token = ops.seeded_sample(*(x.to(device) for x in given)).cpu()
    assert torch.equal(token[:3], logits[:3].argmax(-1))
    assert token[3] == definitions.seeded_sample.reference(*given)[3]


def test_tokens_of_many_positions_have_the_distribution(ops):
    logits = torch.log(torch.tensor([0.5, 0.0, 0.2, 0.3])).expand(4000, 4).contiguous()
    nothing = torch.zeros(4000, dtype=torch.int64)
    token = ops.seeded_sample(logits, nothing, torch.ones(1), torch.tensor([42]), torch.arange(4000))
    counts = token.bincount(minlength=4)
    assert counts[1] == 0
    torch.testing.assert_close(counts / 4000, logits[0].exp(), atol=0.03, rtol=0)


def test_requests_that_nobody_knows_are_as_none(ops, isa, device):
    """A replay cannot raise: they take the highest logit, and no penalties."""
    logits, requests = torch.randn(3, 50), torch.tensor([2, 10**12, -(10**12)])
    given = (logits, requests, torch.ones(2), torch.tensor([3, 3]), torch.tensor([1, 2, 3]))
    assert torch.equal(ops.seeded_sample(*(x.to(device) for x in given)).cpu(), logits.argmax(-1))
    none, twos = torch.zeros(3, dtype=torch.int32), [torch.full((2,), 2.0)] * 3
    counts = torch.full((2, 2), -1, dtype=torch.int32), torch.ones(2, 50, dtype=torch.int32)
    out = logits.to(device, copy=True)
    ops.counted_penalties(out, *(x.to(device) for x in (requests, none, none, *twos, *counts)))
    assert torch.equal(out.cpu(), logits)


@pytest.mark.parametrize(("width", "spare"), [(1, 0), (50, 0), (8224, 9), (20001, 0)])
def test_counted_penalties(ops, isa, device, width, spare):
    """Drafts count, of the rows up to this one; a negative request, and one with neutral penalties, stay as they are."""
    logits, requests = torch.randn(6, width) * 3, torch.tensor([2, 2, 2, 0, -1, 1])
    tokens = torch.randint(0, width, (6,), dtype=torch.int32)
    drafts = torch.tensor([0, 1, 2, 0, 0, 0], dtype=torch.int32)
    penalties = [torch.rand(3), torch.rand(3) - 0.3, torch.rand(3) + 0.5]
    penalties[0][1], penalties[1][1], penalties[2][1] = 0, 0, 1
    prompt = torch.where(torch.rand(3, -(-width // 32)) < 0.1, torch.randint(-(2**31), 2**31, (1,)), 0).int()
    counts = (torch.rand(3, width + spare) < 0.01).int() * torch.randint(1, 9, (1,)).int()
    given = (requests, tokens, drafts, *penalties, prompt, counts)
    expected, out = logits.clone(), logits.to(device, copy=True)
    definitions.counted_penalties.reference(expected, *given)
    ops.counted_penalties(out, *(x.to(device) for x in given))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[4:].cpu(), logits[4:])
    assert width == 1 or not torch.equal(expected[:3], logits[:3])


@pytest.mark.parametrize("place", [4, 5, 6, 7, 8])
def test_penalties_and_counts_of_other_requests_are_refused(ops, place):
    row, two = torch.zeros(3, dtype=torch.int32), torch.ones(2)
    args = [torch.randn(3, 50), row.long(), row, row, two, two, two, torch.zeros(2, 2).int(), torch.zeros(2, 50).int()]
    args[place] = args[place][:1]
    with pytest.raises(RuntimeError, match="requests"):
        ops.counted_penalties(*args)


def test_noise_of_no_request_is_refused(ops):
    ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="noise for no request"):
        ops.recovered_tokens(ids, ids[:0], ids, None, torch.rand(3, 50), torch.rand(0, 50))


def test_counts_that_do_not_fit_are_refused(ops):
    row = torch.zeros(1, dtype=torch.int64)
    given = (row, row.int(), row.int(), *[torch.ones(1)] * 3)
    with pytest.raises(RuntimeError, match="a vocabulary of 50 needs as many counts, got 40"):
        ops.counted_penalties(torch.randn(1, 50), *given, torch.zeros(1, 2).int(), torch.zeros(1, 40).int())


@pytest.mark.parametrize(("width", "prompt", "output"), [(50, 30, 40), (1000, 0, 3), (1000, 7, 0)])
def test_penalties(ops, isa, device, width, prompt, output):
    """Ids outside of the vocabulary are padding; a row with neutral penalties stays as it is."""
    logits = torch.randn(4, width)
    ids = (torch.randint(-1, width + 1, (4, prompt)), torch.randint(-1, width + 1, (4, output)))
    penalties = [torch.rand(4), torch.rand(4) - 0.3, torch.rand(4) + 0.5]
    penalties[0][1], penalties[1][1], penalties[2][1] = 0, 0, 1
    expected, out = logits.clone(), logits.to(device, copy=True)
    definitions.apply_penalties.reference(expected, *ids, *penalties)
    ops.apply_penalties(out, *(x.to(device) for x in (*ids, *penalties)))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[1].cpu(), logits[1])


@pytest.mark.parametrize(("width", "n"), [(1, 1), (20, 20), (3001, 0), (3001, 5), (20000, 64)])
def test_top_logprobs(ops, isa, device, width, n):
    logprobs = torch.randn(4, width).log_softmax(-1)
    logprobs[1] = logprobs[1].mul(2).round()  # many equals
    logprobs[2, ::2] = -INFINITY
    tokens = torch.randint(0, width, (4,))
    actual = ops.top_logprobs(logprobs.to(device), tokens.to(device), n)
    for got, expected in zip(actual, definitions.top_logprobs.reference(logprobs, tokens, n), strict=True):
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("width", [1, 50, 9001])
@pytest.mark.parametrize("certain", [True, False])
def test_recovered_tokens(ops, isa, device, width, certain):
    ends, draft = torch.tensor([2, 2, 5], dtype=torch.int32), torch.randint(-1, width, (5,)).int()
    target, proposal = torch.rand(5, width).softmax(-1), None if certain else torch.rand(5, width).softmax(-1)
    noise, output = torch.rand(3, width), torch.full((5,), -1, dtype=torch.int32)
    args = (output, ends, draft, proposal, target, noise)
    moved = [None if x is None else x.to(device, copy=True) for x in args]
    ops.recovered_tokens(*moved)
    definitions.recovered_tokens.reference(*args)
    assert torch.equal(moved[0].cpu(), output)
