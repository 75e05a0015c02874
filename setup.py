"Everything is declared in settings.ini; this file only hands it to setuptools."
from configparser import ConfigParser
from setuptools import find_packages, setup

cfg = ConfigParser(delimiters=['='])
cfg.read('settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']
words = lambda key: cfg.get(key, '').split()
lib = cfg['lib_path']

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'],
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
    keywords=cfg['keywords'], python_requires='>='+cfg['min_python'],
    long_description=open('README.md', encoding='utf-8').read(), long_description_content_type='text/markdown',
    classifiers=['Intended Audience :: '+cfg['audience'], 'Programming Language :: Python :: '+cfg['min_python']],
    # data/ lives beside the package in the repository and inside it (sdsel/data) once installed
    packages=[*find_packages(include=[lib, lib+'.*']), f'{lib}.data', f'{lib}.data.prompts'],
    package_dir={lib: lib, f'{lib}.data': 'data', f'{lib}.data.prompts': 'data/prompts'},
    package_data={f'{lib}.data': ['*.toml'], f'{lib}.data.prompts': ['*.jsonl', '*.md']}, zip_safe=False,
    install_requires=words('requirements'), extras_require={'dev': words('dev_requirements')},
    entry_points={'console_scripts': words('console_scripts'), 'nbdev': [f'{lib}={lib}._modidx:d']})
