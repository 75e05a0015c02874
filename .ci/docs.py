"README.md from nbs/index.ipynb, and with --html pages of all notebooks in _docs/: nbdev's processing, written by nbconvert."
import os, re, shutil, sys
import nbformat, yaml
from execnb.nbio import nb2str, read_nb
from nbconvert import HTMLExporter, MarkdownExporter
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.processors import FilterDefaults

def load(p):
    "The notebook at `p` as nbdev documents it: hidden and exported cells removed, front matter as a title."
    nb = read_nb(p)
    FilterDefaults()(nb)
    nb = nbformat.reads(nb2str(nb), as_version=4)
    nb.metadata.language_info = dict(name='python', pygments_lexer='ipython3')
    for c in nb.cells:
        if c.cell_type == 'raw' and c.source.startswith('---'):
            fm = yaml.safe_load(c.source.strip().strip('-'))
            c.cell_type,c.source = 'markdown',f"# {fm.get('title', '')}\n\n> {fm.get('description', '')}"
        if c.cell_type != 'code': continue
        c.source = re.sub(r'^#\|.*\n?', '', c.source, flags=re.M)
        for o in c.outputs:
            if md := o.get('data', {}).get('text/markdown'): o.data['text/markdown'] = re.sub(r'\{target=.*?\}', '', md)
    return nb

def main():
    cfg = get_config()
    text,_ = MarkdownExporter().from_notebook_node(load(cfg.nbs_path/cfg.readme_nb))
    here = lambda m: f"]({os.path.normpath(f'{cfg.nbs_path.name}/{m[1]}')})" # links are relative to the notebook's folder
    text = re.sub(r'\]\((?!https?:|#)([^)]+)\)', here, text)
    (cfg.config_path/'README.md').write_text(re.sub(r'\n{3,}', '\n\n', text).strip()+'\n', encoding='utf-8')
    if '--html' not in sys.argv: return
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    for p in nbglob(as_path=True):
        out = (cfg.doc_path/p.relative_to(cfg.nbs_path)).with_suffix('.html')
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(HTMLExporter().from_notebook_node(load(p))[0], encoding='utf-8')

if __name__ == '__main__': main()
