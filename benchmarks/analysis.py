"sdsel's measurements against published packages and bare forward passes, both sides in one run. See README.md."
import argparse, itertools, json, math, os, random, statistics, subprocess, sys, time
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch
import numpy as np
import torch
from threadpoolctl import threadpool_limits
from sdsel import cached_states, collect_states, layer_statistics, load_prompts, load_target
from sdsel.analysis import states as states_module
from sdsel.analysis.entropy import matrix_entropy, normalise
from sdsel.analysis.selection import all_scores, joint_entropy2, rerank
from sdsel.layers import candidates
from sdsel.run import versions

TENSORS = 'x', 'future', 'entropy', 'token', 'position', 'prompt', 'first_norm'

def options():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--model', default='smollm2-135m')
    p.add_argument('--tokens', type=int, default=4096, help='sample size')
    p.add_argument('--prompts', type=int, help='read only so many prompts in (3) and (4), for a short trial')
    p.add_argument('--pairs', type=int, default=40, help='pairs of layers given to the per-pair packages')
    p.add_argument('--layers', type=int, default=6, help='layers given to the entropy package')
    p.add_argument('--full', action='store_true', help='all pairs and layers: nothing is extrapolated')
    p.add_argument('--probe', type=int, default=2, help='pairs on which each setting of a package is tried')
    p.add_argument('--repeats', type=int, default=3)
    p.add_argument('--threads', type=int, default=torch.get_num_threads())
    p.add_argument('--parts', default='statistics,selection,memory,collection', help='what to measure; other parts of an existing result are kept')
    p.add_argument('--seed', type=int, default=0, help='of the prompts and tokens, and of the measured pairs and layers')
    p.add_argument('--peers', help='folder with the packages of requirements.txt')
    p.add_argument('--out', default=str(Path(__file__).with_suffix('.json')))
    p.add_argument('--child', choices=['collect', 'statistics', 'one-call'], help=argparse.SUPPRESS) # one memory measurement, in its own process
    return p.parse_args()

def timed(f, *a, **kw):
    t = time.perf_counter(); out = f(*a, **kw)
    return time.perf_counter()-t,out

def sample(o):
    s = cached_states(o.model, seed=o.seed)
    return s if o.tokens >= len(s) else s.take(slice(0, o.tokens)) # rows are in random order

def row_scaled(X): return X/X.norm(dim=-1, keepdim=True)

def one_call(x):
    "Debiased CKA of all pairs as pytorch-cka's own class computes it for one model: all Gram matrices at once."
    import cka
    g = torch.bmm(x, x.transpose(1, 2))
    M = cka.hsic_cross(g, g)
    r = M.diagonal().sqrt()
    return (M/r[:,None]/r[None]).numpy()

# (1) entropies and CKA

def cka_peers():
    "Package -> setting -> (function of two row-scaled layers, is it debiased?)."
    import cka
    from ckatorch.core import cka_base, cka_batch
    return {'ckatorch': {'fro_norm': (lambda x, y: cka_base(x, y), False), 'fro_norm unbiased': (lambda x, y: cka_base(x, y, unbiased=True), True),
                         'hsic': (lambda x, y: cka_base(x, y, method='hsic'), False), 'cka_batch': (lambda x, y: cka_batch(x[None], y[None]), True)},
            'pytorch-cka': {'cka_from_features': (lambda x, y: cka.cka_from_features(x, y), True)}}

def entropy_peers():
    "Setting -> function of centred Z with trace(Z Z^T) = n; score_K's n x n spectrum is also repitl's way."
    from vendi_score import vendi
    return {'score_dual': lambda Z: math.log(vendi.score_dual(Z, normalize=False)), 'score_K': lambda Z: math.log(vendi.score_K(Z@Z.T))}

def extrapolate(raw, total):
    "Measured seconds, and apart from them what they predict for `total`."
    s,factor = sum(raw),total/len(raw)
    return dict(measured_seconds=s, measured_count=len(raw), total_count=total, extrapolation_factor=factor,
                extrapolated_seconds=None if factor == 1 else s*factor, raw_seconds=raw)

def all_statistics(o, s):
    K,n,rng = len(s.layers),len(s),random.Random(o.seed)
    U = row_scaled(s.x); pairs = list(itertools.combinations(range(K), 2))
    chosen = pairs if o.full else rng.sample(pairs, min(o.pairs, len(pairs)))
    layers = list(range(K)) if o.full else sorted(rng.sample(range(K), min(o.layers, K)))
    layer_statistics(s.take(slice(0, 256))); one_call(U[:,:256]) # warm up
    ours,theirs = [],[]
    for _ in range(o.repeats):
        t,stats = timed(layer_statistics, s); ours.append(t)
        t,C = timed(one_call, U); theirs.append(t)
    want = {True: stats.cka_debiased, False: stats.cka}
    off = lambda i, j, v, debiased: abs(float(v)-want[debiased][i,j])
    upper = np.triu_indices(K, 1)
    out = dict(tokens=n, boundaries=K, hidden_size=s.hidden_size, pairs_total=len(pairs), pairs_measured=chosen, layers_measured=layers,
               sdsel=dict(computes='Shannon and order-2 entropies, biased and debiased CKA of all pairs, the future state as one more layer, diagnostics',
                          raw_seconds=ours, median_seconds=statistics.median(ours),
                          entropies_alone_seconds=timed(lambda: [matrix_entropy(X) for X in s.x])[0]),
               one_call={'pytorch-cka hsic_cross': dict(computes='debiased CKA of all pairs, no entropies', raw_seconds=theirs, median_seconds=statistics.median(theirs),
                                                       gram_bytes=4*K*n*n, max_abs_difference=float(abs(C-want[True])[upper].max()))}, pairwise={})
    for name,settings in cka_peers().items():
        tried = {}
        for setting,(f,debiased) in settings.items():
            f(U[0,:256], U[1,:256])
            runs = [(i, j, *timed(f, U[i], U[j])) for i,j in chosen[:o.probe]]
            tried[setting] = dict(debiased=debiased, raw_seconds=[r[2] for r in runs], max_abs_difference=max(off(i, j, v, debiased) for i,j,_,v in runs))
        best = min(tried, key=lambda k: sum(tried[k]['raw_seconds']))
        f,debiased = settings[best]
        runs = [(i, j, *timed(f, U[i], U[j])) for i,j in chosen]
        out['pairwise'][name] = dict(settings_tried=tried, fastest_setting=best, debiased=debiased, **extrapolate([r[2] for r in runs], len(pairs)),
                                     max_abs_difference=max(off(i, j, v, debiased) for i,j,_,v in runs))
    Zs,tried = {i: (normalise(s.x[i])*math.sqrt(n)).numpy() for i in layers},{}
    for setting,f in entropy_peers().items():
        f(Zs[layers[0]][:256])
        t,v = timed(f, Zs[layers[0]])
        tried[setting] = dict(raw_seconds=[t], max_abs_difference=abs(v-stats.entropy[layers[0]]))
    best = min(tried, key=lambda k: tried[k]['raw_seconds'])
    runs = [timed(entropy_peers()[best], Zs[i]) for i in layers]
    e = out['entropy'] = {'vendi-score': dict(settings_tried=tried, fastest_setting=best, **extrapolate([t for t,_ in runs], K),
                                              max_abs_difference=max(abs(v-stats.entropy[i]) for i,(_,v) in zip(layers, runs)))}
    seconds = lambda d: d['extrapolated_seconds'] or d['measured_seconds']
    base,mine = seconds(e['vendi-score']),out['sdsel']['median_seconds']
    out['ratio_to_sdsel'] = {f'{k} pairs + vendi-score': dict(ratio=(seconds(d)+base)/mine, extrapolated=not o.full) for k,d in out['pairwise'].items()}
    out['ratio_to_sdsel']['pytorch-cka one call + vendi-score'] = dict(ratio=(statistics.median(theirs)+base)/mine, extrapolated=not o.full)
    return out,stats

# (2) choosing

def selection(o, stats):
    pool,score = stats.index(candidates(stats.num_layers)),joint_entropy2(stats)
    best = lambda: all_scores(score, pool, 3)
    runs = [timed(best) for _ in range(o.repeats)]
    sub,scores = runs[0][1]
    name = lambda s: [stats.layers[i] for i in s]
    again = [timed(rerank, stats, sub, scores) for _ in range(o.repeats)]
    return dict(candidates=len(pool), subsets=len(sub), order2=dict(raw_seconds=[t for t,_ in runs], median_seconds=statistics.median(t for t,_ in runs), best=name(sub[scores.argmax()])),
                rerank=dict(top=min(200, len(sub)), raw_seconds=[t for t,_ in again], median_seconds=statistics.median(t for t,_ in again), best=name(again[0][1][0])))

# (3) collecting

@torch.no_grad()
def collection(o):
    target,prompts,groups,ids = load_target(o.model),load_prompts(n=o.prompts, seed=o.seed),[],[]
    collect = lambda: collect_states(target, prompts, tokens=o.tokens, seed=o.seed)
    split,capture = states_module._batches,target.capture
    def recorded(*a): groups.extend(split(*a)); return groups
    def seen(x, *a): ids.append(x); return capture(x, *a)
    with patch.object(states_module, '_batches', recorded), patch.object(target, 'capture', seen): collect() # warm up, and note the batches
    def plain(model):
        for x in ids: model(input_ids=x.to(target.device), use_cache=False)
    sides = dict(collect_states=collect, with_logits=lambda: plain(target.model), without_head=lambda: plain(target.model.base_model))
    for x in ids[:2]: target.model(input_ids=x.to(target.device), use_cache=False)
    raw = {k: [] for k in sides}
    for _ in range(o.repeats):
        for k,f in sides.items(): raw[k].append(timed(f)[0])
    read,median = sum(len(s) for g in groups for _,s,_ in g),{k: statistics.median(v) for k,v in raw.items()}
    return dict(tokens_sampled=o.tokens, tokens_read=read, tokens_padded=sum(x.numel() for x in ids), batches=len(ids), prompts=len(prompts), raw_seconds=raw, median_seconds=median,
                tokens_per_second={k: read/v for k,v in median.items()},
                speed_of_collect_states={f'relative to {k}': median[k]/median['collect_states'] for k in ('with_logits', 'without_head')})

# (4) memory

def status(key): return 1024*int(next(l for l in Path('/proc/self/status').read_text().splitlines() if l.startswith(key+':')).split()[1])

def child(o):
    "Memory of one task in this fresh process: peak resident size (VmHWM; ru_maxrss would include the parent's)."
    more = {}
    if o.child == 'collect':
        target,prompts = load_target(o.model),load_prompts(n=o.prompts, seed=o.seed)
        target.capture(torch.arange(1, 7)[None], [0])
        more['model_bytes'] = sum(p.nbytes for p in target.model.parameters())
        f = lambda: collect_states(target, prompts, tokens=o.tokens, seed=o.seed)
    else:
        s = sample(o); more['sample_bytes'] = sum(getattr(s, k).nbytes for k in TENSORS)
        if o.child == 'one-call': x = row_scaled(s.x); f = lambda: one_call(x)
        else: s.x.sum(); s.future.sum(); f = lambda: layer_statistics(s) # the sums bring the mapped file in
    try: Path('/proc/self/clear_refs').write_text('5'); more['peak_reset'] = True # forget the peak of loading
    except OSError: more['peak_reset'] = False
    before,loaded = status('VmRSS'),status('VmHWM')
    t,out = timed(f)
    m = dict(before_bytes=before, peak_before_bytes=loaded, peak_bytes=status('VmHWM'), seconds=t, **more)
    if o.child == 'collect':
        m['sample_bytes'] = sum(getattr(out, k).nbytes for k in TENSORS)
        m['extra_bytes'] = m['peak_bytes']-before-m['sample_bytes']
        m['extra_share'] = m['extra_bytes']/(m['model_bytes']+m['sample_bytes'])
    else: m['extra_bytes'] = m['peak_bytes']-before
    print(json.dumps(m))

def memory(o, task):
    args = [a for k in ('model', 'tokens', 'prompts', 'threads', 'seed', 'peers') if (v := getattr(o, k)) is not None for a in (f'--{k}', str(v))]
    return json.loads(subprocess.run([sys.executable, __file__, *args, '--child', task], check=True, capture_output=True, text=True).stdout.splitlines()[-1])

def table(r):
    s,c,m = r['statistics'],r['collection'],r['memory']
    def secs(d): return f"{d['measured_seconds']:.2f} s for {d['measured_count']}" + ('' if d['extrapolated_seconds'] is None else f"; about {d['extrapolated_seconds']:.1f} s for {d['total_count']} (extrapolated)")
    rows = [('sdsel: all entropies and CKA', f"{s['sdsel']['median_seconds']:.2f} s (entropies alone {s['sdsel']['entropies_alone_seconds']:.2f} s)")]
    rows += [(f"{k}, all pairs in one call", f"{d['median_seconds']:.2f} s; largest difference {d['max_abs_difference']:.1e}") for k,d in s['one_call'].items()]
    rows += [(f"{k} {d['fastest_setting']}, pairs", f"{secs(d)}; largest difference {d['max_abs_difference']:.1e}") for k,d in s['pairwise'].items()]
    rows += [(f"{k} {d['fastest_setting']}, layers", f"{secs(d)}; largest difference {d['max_abs_difference']:.1e} nats") for k,d in s['entropy'].items()]
    rows += [(f'ratio to sdsel, {k}', f"{d['ratio']:.1f}{' (extrapolated)' if d['extrapolated'] else ''}") for k,d in s['ratio_to_sdsel'].items()]
    p = r['selection']
    rows += [(f"best of {p['subsets']} triples, order 2", f"{1e3*p['order2']['median_seconds']:.1f} ms"), (f"Shannon re-rank of the best {p['rerank']['top']}", f"{p['rerank']['median_seconds']:.2f} s")]
    rows += [(k.replace('_', ' '), f'{v:.0f} tokens/s') for k,v in c['tokens_per_second'].items()]
    rows += [(f'collect_states {k}', f'{v:.3f}') for k,v in c['speed_of_collect_states'].items()]
    rows += [('collect_states: memory beyond model and sample', f"{m['collect']['extra_bytes']/1e6:.0f} MB = {100*m['collect']['extra_share']:.0f} % of both")]
    rows += [(f'memory beyond the states, {k}', f"{m[k]['extra_bytes']/1e6:.0f} MB") for k in ('statistics', 'one-call')]
    for a,b in rows: print(f'{a:52s} {b}')

def main():
    o = options()
    if o.peers: sys.path.append(o.peers)
    torch.set_num_threads(o.threads)
    with threadpool_limits(o.threads): # numpy's and scipy's share of the same number
        if o.child: return child(o)
        about = dict(command='python benchmarks/analysis.py '+' '.join(sys.argv[1:]).replace(o.peers or '\0', 'PEERS').replace(o.out, 'OUT'), model=o.model, threads=o.threads,
                     seeds=dict(prompts_and_tokens=o.seed, pairs_and_layers=o.seed),
                     versions=dict(**versions(), **{k: version(k) for k in ('scipy', 'scikit-learn', 'ckatorch', 'pytorch-cka', 'vendi-score')}))
        r = json.loads(Path(o.out).read_text()) if Path(o.out).exists() else dict(about={})
        def part(name, f):
            if name not in o.parts.split(','): return
            load = os.getloadavg()
            r[name] = f()
            r['about'][name] = dict(about, load_average=dict(before=load, after=os.getloadavg()))
            Path(o.out).write_text(json.dumps(r, indent=1)+'\n')
        s = sample(o)
        stats = None
        def statistics_part():
            nonlocal stats
            out,stats = all_statistics(o, s)
            return out
        part('statistics', statistics_part)
        part('selection', lambda: selection(o, stats or layer_statistics(s)))
        part('memory', lambda: {k: memory(o, k) for k in ('collect', 'statistics', 'one-call')})
        part('collection', lambda: collection(o))
    table(r)

if __name__ == '__main__': main()
