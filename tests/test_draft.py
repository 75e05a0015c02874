"EAGLE-3: equal to the published code, to real decoding, and to itself after a stop."
from pathlib import Path
import pytest, torch
from safetensors.torch import load_file
from sdsel.draft.eagle3 import Eagle3Draft
from sdsel.draft.losses import step_loss

def test_reference_of_three_layers():
    "Logits and losses of five steps that the published implementations gave for one checkpoint."
    here = Path(__file__).parent/'data'/'ttt_k3'
    draft,case = Eagle3Draft.from_pretrained(here),load_file(here/'case.safetensors')
    S = case['input_ids'].shape[1]
    with torch.no_grad(): logits = draft.ttt(case['input_ids'], case['aux'], steps=5)
    for i,z in enumerate(logits):
        assert (z-case[f'logits.{i}'])[:,:S-1-i].abs().max() < 1e-4
        for mode,name in ('eagle', 'loss_eagle'), ('kl', 'loss_aligned_kl'):
            assert abs(step_loss(case[f'logits.{i}'], case['target_logits'], case['loss_mask'], i, draft.vocabulary, mode)-case[f'{name}.{i}']) < 1e-5, (name, i)
            assert abs(step_loss(z, case['target_logits'], case['loss_mask'], i, draft.vocabulary, mode)-case[f'{name}.{i}']) < 1e-5, (name, i)
