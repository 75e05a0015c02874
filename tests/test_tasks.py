"The scorer against transcripts of real models that were judged by reading them."
from pathlib import Path
import pytest
from sdsel.assets import read_rows
from sdsel.evaluation.tasks import is_right

# Right: the text ends by giving, or announces, the right answer. A text that breaks off gives the last result that it states, if any; one that recites choices gives none.
rows = list(read_rows(Path(__file__).parent/'transcripts.jsonl'))

def test_there_are_enough_of_both(): assert len(rows) >= 50 and 15 <= sum(r['right'] for r in rows) <= len(rows)-15

@pytest.mark.parametrize('r', rows, ids=lambda r: f"{r['model']}, {r['id']}")
def test_scorer_agrees_with_the_reader(r): assert is_right(r['text'], r['answer'], r['letters']) == r['right']

@pytest.mark.parametrize('r', [r for r in rows if r['right'] and not r['letters']], ids=lambda r: f"{r['model']}, {r['id']}")
def test_another_answer_is_wrong(r): assert not is_right(r['text'], str(float(r['answer'])+1.5))
