"Greedy text of every drafter against transformers' generate, on real models: equal tokens, or a tie shown by its margin. See README.md."
import argparse, json, sys
from pathlib import Path
from sdsel import generate, load_prompts, load_target
from sdsel.assets import atomic
from sdsel.draft.checkpoints import load_draft
from sdsel.evaluation.compare import reference
from sdsel.evaluation.metrics import divergence
from sdsel.run import versions

def options():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--models', default='smollm2-135m,qwen2.5-coder-1.5b:qwen2.5-coder-0.5b', help='comma-separated targets, each perhaps with a colon and its draft')
    p.add_argument('--eagle3', help='folder of an EAGLE-3 draft for the only model: its chain and trees instead of the other drafters')
    p.add_argument('--prompts', type=int, default=6)
    p.add_argument('--tokens', type=int, default=64)
    p.add_argument('--seed', type=int, default=0, help='of the prompts')
    p.add_argument('--out', default=str(Path(__file__).with_suffix('.json')))
    return p.parse_args()

def drafters(target, draft, eagle3):
    if eagle3: return {'plain': {}} | {f'eagle3 {name}': dict(method='eagle3', draft=eagle3, **kw) for name,kw in dict(chain=dict(length=5), auto=dict(length='auto'), tree=dict(length=4, width=3), fixed=dict(width=(2, 1, 1))).items()}
    deep = f'first:{target.num_layers*4//5}'
    sides = {'plain': {}, 'lookup': dict(method='lookup'), 'lookup tree': dict(method='lookup', width=3), 'lookup auto': dict(method='lookup', length='auto'),
             'first layers': dict(method='sd', draft=deep, length=3), 'first layers tree': dict(method='sd', draft=deep, length=3, width=2)}
    if draft: sides |= {'model': dict(method='sd', draft=draft, length=4), 'model tree': dict(method='sd', draft=draft, length=3, width=2), 'model auto': dict(method='sd', draft=draft, length='auto')}
    return sides

def main():
    o = options()
    prompts = load_prompts(n=o.prompts, seed=o.seed)
    result = dict(command='python benchmarks/exact.py '+' '.join(sys.argv[1:]), options=vars(o) | dict(out=Path(o.out).name), prompts=dict(name=prompts.name, hash=prompts.hash), versions=versions(), models={})
    for name in o.models.split(','):
        name,_,other = name.partition(':')
        target,draft = load_target(name, device='cpu'),load_target(other, device='cpu') if other else None
        eagle3 = load_draft(o.eagle3, target) if o.eagle3 else None
        row = result['models'][name] = dict(revision=target.provenance['revision'], draft=o.eagle3 or other or None, tokens={}, accepted_length_with_bonus={}, divergences=[])
        for p in prompts:
            want = None
            for side,kw in drafters(target, draft, eagle3).items():
                g = generate(target, p, max_new_tokens=o.tokens, **kw)
                if want is None: want = reference(target, g.prompt, o.tokens)
                row['tokens'][side] = row['tokens'].get(side, 0)+len(g.tokens)
                row['accepted_length_with_bonus'].setdefault(side, []).append(g.accepted_length)
                if d := divergence(target, g.prompt, want, g.tokens): row['divergences'].append(dict(prompt=p.id, side=side, **d))
                print(name, p.id, side, len(g.tokens), round(g.accepted_length, 2), d or 'equal', flush=True)
        with atomic(Path(o.out)) as tmp: tmp.write_text(json.dumps(result, indent=1)+'\n')

if __name__ == '__main__': main()
