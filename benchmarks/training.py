"Forward and backward of the training-time test, and loading of an export: sdsel against the speculators package. See README.md."
import argparse, json, os, statistics, sys, tempfile, time
from dataclasses import replace
from pathlib import Path
p = argparse.ArgumentParser(description=__doc__)
p.add_argument('--peers', help='folder with the packages of README.md; its transformers is used by both sides')
p.add_argument('--target', default='smollm2-135m')
p.add_argument('--prompts', type=int, default=8, help='sequences of the batch')
p.add_argument('--tokens', type=int, default=160, help='new tokens of each answer at most')
p.add_argument('--vocabulary', default='2048,8192', help='sizes of the draft vocabulary')
p.add_argument('--steps', default='3,5')
p.add_argument('--layers', default='2,15,27')
p.add_argument('--repeats', type=int, default=5)
p.add_argument('--out', default=str(Path(__file__).with_suffix('.json')))
o = p.parse_args()
if o.peers: sys.path.insert(0, o.peers)
import numpy as np, torch
from sdsel import load_prompts, load_target
from sdsel.assets import atomic
from sdsel.draft.answers import answer_prompts, count_tokens, draft_vocabulary
from sdsel.draft.checkpoints import save_draft
from sdsel.draft.eagle3 import make_draft
from sdsel.draft.features import Online
from sdsel.draft.training import Lesson, TrainConfig, row_counts
from sdsel.run import versions

def peer(folder):
    "speculators' model from an export of ours."
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = 'eager' # flex attention has no backward on a CPU
    return Eagle3DraftModel.from_pretrained(folder, config=config)

def packed(target, batch):
    "The same sequences in speculators' form: one row, tokens and target rows shifted by one; it norms the target's last states itself."
    before_norm = target.capture(batch.ids, [target.num_layers]).states[target.num_layers]
    parts = dict(input_ids=[], hidden_states=[], loss_mask=[], document_ids=[], position_ids=[], verifier_last_hidden_states=[])
    for b in range(len(batch.ids)):
        s = int(batch.mask[b].nonzero()[-1])+2 # up to the last own word
        rows,last = batch.mask[b,:s],before_norm[b,:s]
        for k,v in dict(input_ids=batch.ids[b,1:s], hidden_states=batch.aux[b,:s-1], loss_mask=rows[1:], document_ids=torch.full((s-1,), b), position_ids=torch.arange(1, s), verifier_last_hidden_states=last[1:]).items(): parts[k].append(v)
    return {k: torch.cat(v)[None] for k,v in parts.items()}

def main():
    torch.manual_seed(0)
    target = load_target(o.target, device='cpu')
    layers = [int(x) for x in o.layers.split(',')]
    result = dict(command='python benchmarks/training.py '+' '.join(a for a in sys.argv[1:] if a != o.peers), options={**vars(o), 'peers': bool(o.peers), 'out': Path(o.out).name}, versions=versions(), load_average=os.getloadavg(), rows=[], exports=[])
    with tempfile.TemporaryDirectory() as d:
        d = Path(d)
        answers = answer_prompts(target, load_prompts('gym:gsm_symbolic', o.prompts, 5), d/'answers', o.tokens)
        target.model.save_pretrained(d/'target')
        source = Online(target, answers, layers)
        batch = source.batch(np.arange(len(source)))
        for size in map(int, o.vocabulary.split(',')):
            draft = make_draft(target, layers, draft_vocabulary(count_tokens(answers, target.vocab_size), size))
            own,draft.eagle = draft.eagle,replace(draft.eagle, target=str(d/'target')) # speculators reads head and norm from there
            save_draft(draft, d/f'draft-{size}', embedding=True); draft.eagle = own
            theirs = peer(d/f'draft-{size}')
            state = theirs.state_dict()
            equal = {n: torch.equal(state[n], x) for n,x in draft.state_dict().items() if n in state}
            result['exports'].append(dict(vocabulary=size, tensors=len(equal), bit_equal=all(equal.values()), different=[n for n,e in equal.items() if not e], missing=sorted(draft.state_dict().keys()-state.keys())))
            for steps in map(int, o.steps.split(',')): result['rows'].append(race(draft, target, source, batch, theirs, size, steps)); print(json.dumps(result['rows'][-1]), flush=True)
    with atomic(Path(o.out)) as tmp: tmp.write_text(json.dumps(result, indent=1)+'\n')
    print(json.dumps(result['exports']))

def race(draft, target, source, batch, theirs, size, steps):
    "Both sides in turns: seconds of forward and backward."
    lesson = Lesson(draft, target, TrainConfig(steps=steps, decay=1.))
    count = torch.tensor(row_counts(source, np.arange(len(source)), steps), dtype=torch.float32)
    inputs = packed(target, batch)
    def ours():
        draft.zero_grad(); loss,stats = lesson(batch, count); loss.backward()
        return float((stats[:,0]/stats[:,2]).sum()) # KL, summed over steps as speculators does
    from speculators.losses import resolve_loss_config
    def other():
        theirs.zero_grad(); _,loss,_ = theirs(**inputs, ttt_steps=steps, loss_config=resolve_loss_config('kl_div', 'eager')); loss.backward()
        return float(loss)
    sides = dict(sdsel=ours, speculators=other)
    took,losses = {s: [] for s in sides},{}
    for _ in range(o.repeats+1):
        for s in sides:
            start = time.perf_counter()
            losses[s] = sides[s]()
            took[s].append(time.perf_counter()-start)
    seconds = {s: statistics.median(t[1:]) for s,t in took.items()}
    words = int(source.rows.sum())
    return dict(vocabulary=size, steps=steps, sequences=len(source), tokens=int(source.lengths.sum()), rows=words, seconds=seconds, all_seconds=took, losses=losses, tokens_per_second={s: words/v for s,v in seconds.items()}, ratio=seconds['speculators']/seconds['sdsel'])

if __name__ == '__main__': main()
