"Decoding: equal to generate token by token, equal in law when sampling, caches as if read afresh, and clear errors."
import itertools
import numpy as np
import pytest, torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare
from sdsel import generate, stream
from sdsel.decoding.acceptance import Sampling, draw, greedy_accept, speculative_sample
from sdsel.decoding.cache import Reader
from sdsel.decoding.kernels import KERNELS, fast_linears
from sdsel.decoding.length import Adaptive, Costs, best_length, speedup
from sdsel.decoding.lookup import Lookup
from sdsel.decoding.loop import Generation, decode, verify
from sdsel.decoding.models import DraftModel, FirstLayers, grow
from sdsel.evaluation.metrics import acceptance_by_position, divergence, paired_ratio, summarise
from sdsel.targets import FAMILIES, Target, byte_tokenizer, load_target, tiny_target

TIE = 1e-4 # logits this close may be ordered either way by rounding
costs = Costs(tuple(1+.05*i for i in range(8)), .2)

def theirs(target, ids, n, **kw):
    "New tokens of transformers' own greedy decoding."
    with torch.no_grad(): return target.model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=n, do_sample=False, **kw)[0,len(ids):].tolist()

def last(it):
    *_,g = it
    return g

def drafters(target, small):
    return dict(none=lambda: None, chain=lambda: DraftModel(small, 4), tree=lambda: DraftModel(small, 3, width=3, nodes=7), itself=lambda: DraftModel(target, 3),
                adaptive=lambda: DraftModel(small, Adaptive(costs)), first=lambda: FirstLayers(target, 2, length=3), first_tree=lambda: FirstLayers(target, 2, length=3, width=2),
                lookup=lambda: Lookup(4), lookup_tree=lambda: Lookup(4, width=3), lookup_adaptive=lambda: Lookup(Adaptive(costs)))

# equal tokens

def agree(target, ids, want, got, seen):
    "Equal, or parted at a tie."
    seen['tokens'] += len(got)
    if d := divergence(target, ids, want, got): seen['ties'].append(d); assert d['margin'] < TIE, d

def test_greedy_is_generate(record_property):
    "All families and drafters, more than 10,000 tokens; sliding windows shorter than the text."
    seen = dict(tokens=0, ties=[])
    for family in FAMILIES:
        target = tiny_target(family, seed=3, **(dict(sliding_window=11) if family in ('mistral', 'mixtral') else {}))
        small = tiny_target(family, num_layers=1, seed=4)
        for text in 'abcabcabc, and so on', 'x':
            ids = target.tokenizer(text)['input_ids']
            want = theirs(target, ids, 80)
            for name,make in drafters(target, small).items(): agree(target, ids, want, last(decode(target, ids, make(), max_new_tokens=80)).tokens, seen)
    assert seen['tokens'] >= 10_000
    record_property('tokens', seen['tokens']); record_property('ties', len(seen['ties']))

def test_greedy_is_generate_on_the_real_model():
    "SmolLM2, packed weights and all."
    target,seen = load_target('smollm2-135m', device='cpu'),dict(tokens=0, ties=[])
    for prompt in 'List the days of the week twice.', 'def add(a, b):':
        for kw in dict(), dict(method='lookup', width=2), dict(method='sd', draft='first:24', length=3), dict(method='sd', draft='first:24', length=3, width=2):
            g = generate(target, prompt, max_new_tokens=40, **kw)
            agree(target, g.prompt, theirs(target, g.prompt, 40), g.tokens, seen)
    assert seen['tokens'] > 200

@pytest.mark.parametrize('most', [1, 2, 3, 5, 8])
def test_exactly_max_new_tokens(most):
    target = tiny_target(seed=3)
    for make in drafters(target, tiny_target(num_layers=1, seed=4)).values():
        g = last(decode(target, [1, 2, 3], make(), max_new_tokens=most, eos=()))
        assert len(g.tokens) == most and g.finish == 'length' and [t for r in g.rounds for t in r.tokens] == g.tokens

def test_eos_inside_an_accepted_block():
    target = tiny_target(seed=3)
    ids = target.tokenizer('abc')['input_ids']
    plain = last(decode(target, ids, max_new_tokens=40, eos=())).tokens
    inside = 0
    for eos in set(plain):
        want = plain[:plain.index(eos)+1]
        assert theirs(target, ids, 40, eos_token_id=eos) == want
        for name,make in drafters(target, tiny_target(num_layers=1, seed=4)).items():
            g = last(decode(target, ids, make(), max_new_tokens=40, eos=(eos,)))
            assert g.tokens == want and g.finish == 'eos', name
            inside += len(g.rounds[-1].tokens) <= len(g.rounds[-1].path)
    assert inside, 'no text ended inside an accepted block: the test shows nothing'

def test_stop_strings_as_in_generate():
    target = tiny_target(seed=3)
    ids = target.tokenizer('abc')['input_ids']
    text = map(target.tokenizer.decode, last(decode(target, ids, max_new_tokens=40, eos=())).tokens[4:])
    stop = next(c for c in text if c.isalnum() and c.isascii())
    want = theirs(target, ids, 40, stop_strings=[stop], tokenizer=target.tokenizer)
    for make in drafters(target, tiny_target(num_layers=1, seed=4)).values():
        g = last(decode(target, ids, make(), max_new_tokens=40, stop=stop))
        assert g.tokens == want and g.finish == 'stop'

# equal in law

V = 6
def random_model(layers, seed):
    "Six tokens, and logits that differ enough to tell laws apart."
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    m = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None))
    with torch.no_grad(): m.lm_head.weight.mul_(40)
    return Target(m, None, f'random-{seed}')

def exact(target, ids, sampling, n):
    "Probability of each continuation of n tokens."
    law = {}
    for seq in itertools.product(range(V), repeat=n):
        p = sampling.probs(target.model(torch.tensor([[*ids, *seq[:-1]]])).logits[0,len(ids)-1:].double())
        law[seq] = float(torch.stack([p[i,x] for i,x in enumerate(seq)]).prod())
    return law

def pvalue(counts, law):
    "Chi-square; cells with fewer than five expected are pooled, and an impossible one refutes."
    n = sum(counts.values())
    if any(c and law[s] < 1e-12 for s,c in counts.items()): return 0.
    big = [s for s in law if n*law[s] >= 5]
    observed,expected = [counts.get(s, 0) for s in big],[n*law[s] for s in big]
    if (rest := n-sum(expected)) > 1e-6: observed.append(n-sum(observed)); expected.append(rest)
    if expected[-1] < 1 and len(expected) > 1: observed[-2:] = [sum(observed[-2:])]; expected[-2:] = [sum(expected[-2:])]
    return 1. if len(observed) < 2 else chisquare(observed, np.array(expected)*n/sum(expected)).pvalue

def frequencies(target, ids, make, sampling, n, draws, rule=verify):
    counts,d = {},make()
    for seed in range(draws):
        s = tuple(last(decode(target, ids, d, sampling, n, seed, eos=(), rule=rule)).tokens)
        counts[s] = counts.get(s, 0)+1
    return counts

def broken(draft, logits, sampling, generator):
    "Draws corrections from p instead of what is left of it."
    p,path = sampling.probs(logits),[]
    for i,x in enumerate(draft.tokens):
        if torch.rand((), generator=generator).item()*draft.q[i,x] >= p[i,x]: break
        path.append(i)
    from sdsel.decoding.acceptance import Verdict
    return Verdict(tuple(path), int(draw(p[len(path)], generator)))
broken.lossless = False

target6,bad6 = random_model(2, 1),random_model(1, 2) # the draft has nothing to do with the target

@pytest.mark.parametrize('sampling', [Sampling(1.), Sampling(.7, top_k=3), Sampling(1.3, top_p=.8)], ids=str)
@pytest.mark.parametrize('make', [lambda: DraftModel(bad6, 2), lambda: DraftModel(bad6, 2, width=2, nodes=4), lambda: FirstLayers(target6, 1, length=2), lambda: Lookup(2, shortest=1, width=2), lambda: None],
                         ids=['chain', 'tree', 'first layers', 'lookup tree', 'none'])
def test_joint_law_of_three_tokens(make, sampling):
    ids = [0, 1, 0, 2, 0]
    assert pvalue(frequencies(target6, ids, make, sampling, 3, 700), exact(target6, ids, sampling, 3)) > 1e-4

def test_a_broken_verifier_is_found():
    ids,sampling = [0, 1, 0, 2, 0],Sampling(1.)
    assert pvalue(frequencies(target6, ids, lambda: DraftModel(bad6, 2), sampling, 3, 700, broken), exact(target6, ids, sampling, 3)) < 1e-6

@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_law_of_a_verdict_on_any_tree(seed):
    "First token after a random tree of computed and of drawn siblings, from the exact law of the verifier."
    r = np.random.default_rng(seed)
    p = torch.tensor(r.dirichlet(np.full(4, .5), 9)); g = torch.Generator().manual_seed(seed)
    counts = np.zeros(4)
    for _ in range(600):
        n,drawn = 1+seed % 3,seed % 2
        left,tokens,laws = torch.tensor(r.dirichlet(np.full(4, .5))) if drawn else None,[],[]
        if drawn:
            for _ in range(n): laws.append(left/left.sum()); tokens.append(int(draw(laws[-1], g))); left = left.clone(); left[tokens[-1]] = 0
        else: tokens = list(range(n))
        v = speculative_sample(tokens, p, torch.stack(laws) if drawn else None, [-1]*n, g)
        counts[tokens[v.path[0]] if v.path else v.token] += 1
    assert pvalue(dict(enumerate(counts)), dict(enumerate(p[0].tolist()))) > 1e-5

@given(st.data())
def test_greedy_accept_is_a_walk(data):
    n = data.draw(st.integers(0, 8))
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    parents = [data.draw(st.integers(-1, i-1)) for i in range(n)]
    best = data.draw(st.lists(st.integers(0, 3), min_size=n+1, max_size=n+1))
    v = greedy_accept(tokens, torch.eye(4)[best], parents)
    at = -1
    for i in v.path: assert parents[i] == at and tokens[i] == best[at+1]; at = i
    assert v.token == best[at+1] and not any(p == at and x == v.token for x,p in zip(tokens, parents))

# caches

@pytest.mark.parametrize('family', FAMILIES)
def test_cache_after_each_round_is_the_cache_read_afresh(family):
    target,small = tiny_target(family, seed=3),tiny_target(family, num_layers=1, seed=4)
    ids = target.tokenizer('abcabc')['input_ids']
    class Spy: pass
    for name,make in drafters(target, small).items():
        drafter,spy = make(),Spy()
        if drafter is None: continue
        start = drafter.start
        def started(reader, *a): spy.reader = reader; start(reader, *a)
        drafter.start = started
        for g in decode(target, ids, drafter, max_new_tokens=20, eos=()):
            for reader in (spy.reader, getattr(drafter, 'reader', spy.reader)):
                text = [*g.prompt, *[t for r in g.rounds for t in r.tokens]][:reader.length]
                fresh = Reader(reader.target); fresh.read(text)
                if reader is spy.reader and not g.finish: assert reader.length == len(g.prompt)+len(g.tokens)-1 and not reader.paths
                for a,b in zip(reader.cache.layers, fresh.cache.layers):
                    assert torch.allclose(a.keys[:,:,:len(text)], b.keys[:,:,:len(text)], atol=1e-5) and torch.allclose(a.values[:,:,:len(text)], b.values[:,:,:len(text)], atol=1e-5)

@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_walks_of_a_reader(data):
    "Any order of reading, looking, keeping and going back leaves what a fresh pass computes."
    target = walks
    r,text = Reader(target, 4),[]
    for _ in range(data.draw(st.integers(1, 6))):
        new = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=4))
        if data.draw(st.booleans()): z = r.read(new); text += new; rows = [(len(new)-1, text)]
        else:
            parents = [data.draw(st.integers(-1, i-1)) for i in range(len(new))]
            z,paths = r.look(new, parents),[]
            for i,p in enumerate(parents): paths.append((paths[p] if p >= 0 else [])+[i])
            rows = [(i, text+[new[j] for j in path]) for i,path in enumerate(paths)]
            kept = data.draw(st.sampled_from([[], *paths])); r.keep(kept); text = text+[new[j] for j in kept]
        for i,seq in rows: assert torch.allclose(z[i], target.model(torch.tensor([seq])).logits[0,-1], atol=1e-4)
        if text and data.draw(st.booleans()): n = data.draw(st.integers(0, len(text))); r.back(n); text = text[:n]
        assert r.length == len(text)
walks = tiny_target('gemma3', seed=5)

def test_static_buffers_decode_alike():
    for family in FAMILIES:
        target = tiny_target(family, seed=3)
        for make in drafters(target, tiny_target(family, num_layers=1, seed=4)).values():
            a,b = (last(decode(target, [5, 6, 7], make(), max_new_tokens=16, eos=(), static=s)) for s in (False, True))
            assert a.tokens == b.tokens

# speed devices change nothing but speed

def test_kernels_are_undone_after_an_error():
    target = tiny_target()
    with pytest.raises(KeyError):
        with fast_linears(target): raise KeyError
    assert not [m for m in target.model.modules() if 'forward' in vars(m)]

@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('family', FAMILIES)
def test_kernels_decode_alike(family, kernel):
    target = tiny_target(family, seed=3)
    want = last(decode(target, [5, 6, 7], max_new_tokens=16, eos=())).tokens
    with fast_linears(target, kernels=[kernel]): assert last(decode(target, [5, 6, 7], DraftModel(tiny_target(family, num_layers=1), 3), max_new_tokens=16, eos=())).tokens == want

def test_gradients_pass_through_fast_linears():
    target = tiny_target()
    with fast_linears(target, kernels=['packed']): target.head(torch.ones(2, 32, requires_grad=True)).sum().backward()

def test_a_draft_that_shares_weights_shares_their_packs():
    target = tiny_target()
    with fast_linears(target, kernels=['packed']): last(decode(target, [5, 6, 7], max_new_tokens=2))
    d = FirstLayers(target, 2)
    assert d.model.blocks[0].mlp.up_proj.weight._pack is target.blocks[0].mlp.up_proj.weight._pack

def test_compiled_decodes_alike():
    pytest.importorskip('torch._inductor')
    import shutil
    if not shutil.which('g++'): pytest.skip('torch.compile needs a C++ compiler')
    target = tiny_target(num_layers=1)
    want = generate(target, [5, 6, 7], method='lookup', length=1, max_new_tokens=6, speed='off').tokens
    assert generate(target, [5, 6, 7], method='lookup', length=1, max_new_tokens=6, speed='compile').tokens == want
    assert 'forward' not in vars(target.model)

# length

@given(st.floats(0, 1), st.lists(st.floats(.01, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_best_length_is_best(a, steps, d):
    c = Costs(tuple(1+x for x in itertools.accumulate([0, *steps])), d)
    assert speedup(a, best_length(a, c), c) == max(speedup(a, g, c) for g in range(len(c.verify)))
    assert speedup(a, best_length(a, c), c) >= speedup(a, 0, c) == pytest.approx(1)

@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3))
def test_trees_are_the_most_probable_paths(seed, depth, width):
    "With full width the tree holds the best paths of all."
    r = np.random.default_rng(seed)
    p = torch.tensor(np.log(r.dirichlet(np.ones(3))))
    full = grow(p, lambda tokens, parents: p.expand(len(tokens), -1), depth, 3**depth, 10**6)
    assert len(full[0]) == sum(3**d for d in range(1, depth+1))
    n = 2*depth
    tokens,parents,seen,_ = grow(p, lambda tokens, parents: p.expand(len(tokens), -1), depth, width, n)
    assert all(-1 <= q < i for i,q in enumerate(parents)) and len(tokens) <= n and len(set(zip(parents, tokens))) == len(tokens)

# records and errors

def test_record_round_trip_and_counts():
    target = tiny_target(seed=3)
    g = generate(target, 'abc', method='sd', draft='first:2', length=3, max_new_tokens=20)
    again = Generation.from_json(g.to_json())
    assert again == g and again.accepted_length == len(g.tokens)/len(g.rounds)
    assert g.target_calls == len(g.rounds)+1 and g.draft_calls >= len([r for r in g.rounds if r.drafted])
    assert 0 <= g.target_seconds+g.draft_seconds <= g.seconds and 0 <= g.bookkeeping <= 1 and g.lossless
    assert {'target', 'revision', 'torch', 'method', 'draft', 'seed', 'length', 'temperature'} <= g.provenance.keys()
    assert summarise([g]).accepted_length_with_bonus[0] == g.accepted_length and acceptance_by_position([g]).tested.sum() > 0

def test_stream_yields_each_round():
    lengths = [len(g.tokens) for g in stream(tiny_target(seed=3), 'abc', method='lookup', max_new_tokens=20)]
    assert lengths == sorted(set(lengths)) and lengths[-1] <= 20

def test_prompts_of_every_kind():
    t = tiny_target()
    ids = generate(t, 'hello', max_new_tokens=1).prompt
    assert ids == generate(t, [dict(role='user', content='hello')], max_new_tokens=1).prompt == generate(t, torch.tensor([ids]), max_new_tokens=1).prompt == generate(t, torch.tensor(ids), max_new_tokens=1).prompt
    assert generate(t, 'hello', raw=True, max_new_tokens=1).prompt == t.tokenizer('hello')['input_ids']

def nan_target():
    t = tiny_target()
    with torch.no_grad(): t.model.model.layers[1].mlp.up_proj.weight[0] = float('nan')
    return t

@pytest.mark.parametrize('kw,error,match', [
    (dict(prompt=''), ValueError, 'empty'), (dict(prompt=[]), ValueError, 'empty'), (dict(prompt=torch.ones(2, 3, dtype=torch.long)), ValueError, 'batch of 2'), (dict(prompt=['a', 'b']), ValueError, 'batch of 2'),
    (dict(prompt=[300]), ValueError, '300 is no token'), (dict(prompt=[1.5]), ValueError, 'no token'), (dict(max_new_tokens=True), ValueError, 'max_new_tokens'), (dict(max_new_tokens=4000), ValueError, '2048 positions'),
    (dict(method='sd'), ValueError, 'needs a draft'), (dict(method='sd', draft='nosuch'), ValueError, 'nosuch'), (dict(method='sd', draft='first:0'), ValueError, 'between 1 and 3'), (dict(method='sd', draft='first:4'), ValueError, 'has 4 layers'),
    (dict(method='sd', draft='first:2', length=True), ValueError, 'length'), (dict(method='sd', draft='first:2', width=0), ValueError, 'width'), (dict(temperature=float('nan')), ValueError, 'temperature'),
    (dict(top_k=3), ValueError, 'temperature > 0'), (dict(target=nan_target()), FloatingPointError, 'NaN'), (dict(target='nosuch'), ValueError, 'nosuch')])
def test_errors(kw, error, match):
    with pytest.raises(error, match=match): generate(**{**dict(target=tiny_target(), prompt='hi', max_new_tokens=4), **kw})

def test_another_tokenizer_is_refused():
    other = tiny_target(num_layers=1); other.tokenizer.add_tokens(['<new>'])
    with pytest.raises(ValueError, match='<new>'): generate(tiny_target(), 'hi', method='sd', draft=other)

def test_a_draft_with_a_larger_embedding_never_offers_what_the_target_lacks():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    wide = Target(LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)), byte_tokenizer(), 'wide')
    for kw in dict(), dict(temperature=1., seed=1), dict(width=2):
        g = generate(tiny_target(), 'hi', method='sd', draft=wide, max_new_tokens=20, **kw)
        assert max(x for r in g.rounds for x in r.drafted) < 257

def test_no_chat_template():
    t = tiny_target(); t.tokenizer.chat_template = None
    with pytest.raises(ValueError, match='raw=True'): generate(t, 'hi')
    assert generate(t, 'hi', raw=True, max_new_tokens=2).tokens

def test_attention_without_masks_is_refused():
    t = tiny_target(); t.config._attn_implementation = 'flash_attention_2'
    with pytest.raises(ValueError, match='flash_attention_2'): generate(t, 'hi')

def test_intervals():
    r = np.random.default_rng(0)
    hits = 0
    for i in range(100):
        x = r.uniform(1, 2, 20)
        ratio,low,high = paired_ratio(x*np.exp(r.normal(0, .2, 20)), x, draws=400, seed=i)
        assert low <= ratio <= high; hits += low <= np.exp(.02) <= high
    assert hits > 80
