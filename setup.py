"""Packaging of fairseq_el, and every requirement of the project with its version.

The Makefile imports REQUIREMENTS, so that set-up and package can't disagree; hence the guard
around setup() at the end.
"""


def by_python(new: str, old: str) -> list[str]:
    """One requirement for Python >= 3.11, where all of this is tested, and one for Python 3.10."""
    return [f'{new}; python_version >= "3.11"', f'{old}; python_version < "3.11"']


REQUIREMENTS = {
    "torch": [
        "torch==2.13.0",
        # Stock fairseq 0.12.2 uses np.float, which numpy 1.24 removed.
        *by_python("numpy==2.4.6", "numpy==1.23.5"),
    ],
    # What compiles fairseq. Together with torch it has to be there first, because fairseq is built
    # without build isolation: isolated, it would download a second torch and compile against that.
    "build": [
        "cython==3.3.1",
        "ninja==1.13.2",
        "setuptools<81",  # 80 is known to build fairseq
        "wheel==0.48.0",
    ],
    # fairseq itself, always installed alone (--no-deps): its declared dependency torchaudio has no
    # build for torch 2.13.0, and an unmatched one breaks other libraries. For that reason it is not
    # in install_requires either, where pip would resolve it together with torchaudio.
    # fairseq-fixed is the code of 0.12.2 made to import on Python >= 3.11.
    "fairseq": by_python("fairseq-fixed==0.12.3.1", "fairseq==0.12.2"),
    # What fairseq needs at run time, less torch, numpy (above) and torchaudio (not at all).
    "run": [
        *by_python("hydra-core==1.3.2", "hydra-core==1.0.7"),
        *by_python("omegaconf==2.3.0", "omegaconf==2.0.6"),
        *by_python("regex==2026.11.9", "regex"),
        *by_python("scikit-learn==1.9.1", "scikit-learn==1.2.2"),
        "bitarray==3.12.3",
        "cffi==2.1.1",
        "packaging==26.3",
        "sacrebleu==2.6.0",
        "safetensors==0.8.0",
        "tqdm==4.70.1",
    ],
    # The demo: its text in pieces, and its score.
    "demo": [
        "rouge-score==0.1.2",
        "sentencepiece==0.2.2",
    ],
    # Data sets as Hugging Face keeps them.
    "data": by_python("pyarrow==26.0.1", "pyarrow"),
    # Many processes, on one machine or many: scripts/summarize.py --engine ray.
    "ray": by_python("ray[data]==2.60.0", "ray[data]"),
    "test": [
        *by_python("hypothesis==6.170.15", "hypothesis==6.131.0"),
        "mypy==2.4.1",
        "pytest==9.2.0",
        "pytest-xdist==3.8.0",
        "ruff==0.17.4",
        # what converted checkpoints are compared with
        *by_python("transformers==5.22.2", "transformers"),
        # what draws the benchmarks' plots
        *by_python("matplotlib==3.11.2", "matplotlib"),
    ],
    # Other systems, to compare speed with, and plots. Nothing but the benchmarks imports these.
    "benchmark": [
        "ctranslate2==4.8.4",
        "matplotlib==3.11.2",
        "transformers==5.22.2",
    ],
}

if __name__ == "__main__":
    from pathlib import Path

    from setuptools import find_packages, setup

    setup(
        name="fairseq_el",
        version="0.2.0",
        description="EL-attention for fairseq: the same hypotheses from a fraction of the cache",
        long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license="MIT",
        packages=find_packages(include=["fairseq_el", "fairseq_el.*"]),
        package_data={"fairseq_el": ["kernels/cpp/*"]},
        entry_points={"console_scripts": ["fairseq-el=fairseq_el.cli.main:main"]},
        python_requires=">=3.10",  # the oldest Python with builds of torch 2.13.0
        install_requires=REQUIREMENTS["torch"] + REQUIREMENTS["run"],
        extras_require={
            "demo": REQUIREMENTS["demo"],
            "data": REQUIREMENTS["data"],
            "ray": REQUIREMENTS["ray"],
            "test": [line for group in ("demo", "data", "ray", "test") for line in REQUIREMENTS[group]],
            "benchmark": REQUIREMENTS["benchmark"],
        },
    )
