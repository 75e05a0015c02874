"sdsel's decoding against transformers' own generate and assisted generation, all sides in one run. See README.md."
import argparse, json, os, statistics, sys, time
from pathlib import Path
from sdsel import load_prompts, load_target
from sdsel.assets import atomic
from sdsel.decoding.cache import Reader
from sdsel.decoding.generate import generate, prompt_ids
from sdsel.decoding.kernels import fast_linears
from sdsel.evaluation.compare import compare, digest, reference
from sdsel.run import versions

def options():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--target', default='qwen2.5-coder-1.5b')
    p.add_argument('--draft', default='qwen2.5-coder-0.5b')
    p.add_argument('--small', default='smollm2-135m', help='a second target, for plain decoding')
    p.add_argument('--prompts', type=int, default=21)
    p.add_argument('--tokens', type=int, default=48, help='new tokens per prompt')
    p.add_argument('--length', type=int, default=5, help='guesses per round, on both sides')
    p.add_argument('--repeats', type=int, default=7, help='of single passes')
    p.add_argument('--seed', type=int, default=0, help='of the prompts')
    p.add_argument('--out', default=str(Path(__file__).with_suffix('.json')))
    return p.parse_args()

def timed(f):
    start = time.perf_counter(); out = f()
    return time.perf_counter()-start,out

def passes(target, repeats, rows=(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16), context=64):
    "Median seconds of passes over a few tokens, interleaved, so that noise hits all alike."
    r = Reader(target, context+max(rows))
    r.read(list(range(100, 100+context)), rows=1)
    took = {n: [] for n in rows}
    for _ in range(repeats+1):
        for n in rows:
            took[n].append(timed(lambda: r.look(list(range(200, 200+n))))[0]); r.keep([])
    return {n: statistics.median(t[1:]) for n,t in took.items()}

def main():
    o = options()
    prompts = load_prompts(n=o.prompts, seed=o.seed)
    result = dict(command='python benchmarks/decoding.py '+' '.join(sys.argv[1:]), options=vars(o) | dict(out=Path(o.out).name), prompts=dict(name=prompts.name, hash=prompts.hash), versions=versions(),
                  load_average_before=os.getloadavg(), models={}, passes={}, comparisons={})
    def note():
        with atomic(Path(o.out)) as tmp: tmp.write_text(json.dumps(result, indent=1)+'\n')
    small,target,draft = (load_target(n, device='cpu') for n in (o.small, o.target, o.draft))
    for t in (small, target, draft):
        result['models'][t.name] = t.provenance
        before = passes(t, o.repeats)
        with fast_linears(t): after = passes(t, o.repeats)
        result['passes'][t.name] = dict(linear=before, fast=after, kernels=[k.__name__ for k in t.fast[:17]], six_rows_to_one=after[6]/after[1], one_row_fast_to_linear=before[1]/after[1])
        print(t.name, result['passes'][t.name], flush=True)
    jobs = {f'plain {o.small}': (small, {'generate': lambda ids: reference(small, ids, o.tokens), 'sdsel ar': lambda ids: generate(small, ids, max_new_tokens=o.tokens),
                                         'sdsel lookup': lambda ids: generate(small, ids, method='lookup', length='auto', max_new_tokens=o.tokens)}),
            f'{o.draft} to {o.target}': (target, {'generate': lambda ids: reference(target, ids, o.tokens), 'assisted generation': lambda ids: reference(target, ids, o.tokens, draft, o.length),
                                         'sdsel ar': lambda ids: generate(target, ids, max_new_tokens=o.tokens),
                                         'sdsel sd': lambda ids: generate(target, ids, method='sd', draft=draft, length=o.length, max_new_tokens=o.tokens),
                                         'sdsel sd auto': lambda ids: generate(target, ids, method='sd', draft=draft, length='auto', max_new_tokens=o.tokens)})}
    for name,(t,sides) in jobs.items():
        warm = prompt_ids(t, prompts[0])[:32]
        for f in sides.values(): f(warm) # packs weights, loads what is loaded late
        rows = []
        for i,p in enumerate(prompts):
            rows.append(compare(sides, t, p, i))
            print(name, i, p.kind, {s: round(x, 2) for s,x in rows[-1]['seconds'].items()}, rows[-1]['divergence'] or '', flush=True)
            if i: result['comparisons'][name] = dict(digest(rows), rows=rows); note()
    result['load_average_after'] = os.getloadavg(); note()
    for name,c in result['comparisons'].items(): print(name, json.dumps({k: v for k,v in c.items() if k != 'rows'}, indent=1))

if __name__ == '__main__': main()
