#!/usr/bin/env bash
# From Debian's package indexes to the demo's model; training takes about two hours on 2 cores:
#
#     make install && demo/recipe/run.sh
#
# The indexes of Debian 12, and of 13 and 11 for more to train on, are fetched with apt-get (no root
# needed), from the mirror that apt has for Debian 12. Where apt has none, put them (the files
# main/i18n/Translation-en, unpacked) into build/recipe/indexes as bookworm, trixie and bullseye.
# Everything goes into build/recipe, the result into build/recipe/demo, laid out as demo/ is. A stage
# whose result is there already is skipped, and interrupted training goes on where it was saved.
# A trial that trains nothing of use in a few minutes:
#
#     STAGE4_UPDATES=20 STAGE5_UPDATES=20 STAGE6_UPDATES=20 demo/recipe/run.sh
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/../.."

recipe=demo/recipe
work=build/recipe
indexes=$work/indexes
export PATH="$PWD/.venv/bin:$PATH" PYTHONWARNINGS=ignore
mkdir -p "$indexes"

stage() { printf '\n== %s\n' "$1"; }

# finished DIR: true when that stage's result is complete; finish DIR: it now is.
finished() { [[ -e $1/finished ]]; }
finish() { touch "$1/finished"; }

# apt with lists and sources of our own.
own_apt() {
  apt-get -o "Dir::State=$PWD/$work/apt" -o "Dir::Cache=$PWD/$work/apt" -o Dir::Etc::sourcelist=/dev/null \
    -o "Dir::Etc::sourceparts=$PWD/$work/apt/sources" -o Acquire::Languages=en "$@"
}

# fetch_indexes RELEASE...: ask apt for their indexes, and unpack them.
fetch_indexes() {
  local mirror
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Codename: bookworm' 'Component: main' | sort -u | head -n 1)
  if [[ -z $mirror ]]; then
    echo "apt has no source for Debian 12 (bookworm): put the indexes into $indexes, see the top of $0" >&2
    exit 1
  fi
  mkdir -p $work/apt/{lists/partial,archives/partial,sources}
  printf '%s\n' 'Types: deb' "URIs: $mirror" "Suites: $*" 'Components: main' \
    'Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg' >$work/apt/sources/debian.sources
  own_apt update
  for release; do
    /usr/lib/apt/apt-helper cat-file "$(own_apt indextargets --format '$(FILENAME)' \
      'Created-By: Translations' "Codename: $release")" >"$indexes/$release.part"
    mv "$indexes/$release.part" "$indexes/$release"
  done
}

# prepare NAME FOLDER TRAIN: the texts of that folder in fairseq's binary format, as NAME-bin, one dictionary for
# both sides; TRAIN is the name of those to train on.
prepare() {
  local texts=$work/$2 out=$work/$1-bin
  finished "$out" && return
  rm -rf "$out" # of an interrupted run: fairseq-preprocess overwrites nothing
  fairseq-preprocess --source-lang source --target-lang target --joined-dictionary \
    --srcdict "$work/pieces/dict.txt" --trainpref "$texts/$3" --validpref "$texts/valid" --destdir "$out"
  finish "$out"
}

# train DATA SAVE UPDATES MAX_TOKENS WARMUP [OPTIONS]: what the training stages have in common. Of an
# option that is given twice, the later one counts.
train() {
  local data=$1 save=$2 updates=$3 max_tokens=$4 warmup=$5
  shift 5
  fairseq-train "$data" --user-dir $recipe/copy_init --arch bart_copy_init_demo --task translation \
    --source-lang source --target-lang target --truncate-source \
    --max-source-positions 512 --max-target-positions 128 --dropout 0.05 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 1.0 \
    --lr 1.2e-3 --lr-scheduler polynomial_decay --warmup-updates "$warmup" \
    --total-num-update "$updates" --max-update "$updates" --max-tokens "$max_tokens" \
    --required-batch-size-multiple 1 --num-workers 0 --seed 1 --cpu \
    --save-dir "$save" --save-interval-updates 500 --keep-interval-updates 3 \
    --no-epoch-checkpoints --log-format simple --log-interval 50 "$@"
}

# export_mean STAGE MODEL: the mean of the checkpoints that a stage has kept; a trial keeps only the last.
export_mean() {
  local checkpoints=("$1"/checkpoint_[0-9]*.pt)
  python $recipe/export.py "$2" "${checkpoints[@]:-$1/checkpoint_last.pt}"
}

stage 'Stage 1: pairs'
releases=(bookworm trixie bullseye)
[[ -e $indexes/bullseye ]] || fetch_indexes "${releases[@]}"
finished $work/pairs || { python $recipe/pairs.py $work/pairs "${releases[@]/#/$indexes/}"; finish $work/pairs; }

stage 'Stage 2: pieces'
finished $work/pieces || { python $recipe/pieces.py $work/pairs $work/pieces; finish $work/pieces; }

stage 'Stage 3: infilling'
finished $work/mixed || { python $recipe/infill.py $work/pieces $work/mixed; finish $work/mixed; }
prepare mixed mixed train

stage 'Stage 4: training on infilling and short sources'
finished $work/stage4 || {
  train $work/mixed-bin $work/stage4 "${STAGE4_UPDATES:-2200}" 3000 200
  finish $work/stage4
}

stage 'Stage 5: training on whole pairs'
prepare pieces pieces train
finished $work/stage5 || {
  updates=${STAGE5_UPDATES:-4000}
  train $work/pieces-bin $work/stage5 "$updates" 4000 40 --max-update $((updates / 2)) \
    --finetune-from-model $work/stage4/checkpoint_last.pt
  train $work/pieces-bin $work/stage5 "$updates" 4000 40 --dropout 0.2
  export_mean $work/stage5 $work/stage5/mean.pt
  finish $work/stage5
}

stage 'Stage 6: training on more pairs'
prepare more pieces more
finished $work/stage6 || {
  train $work/more-bin $work/stage6 "${STAGE6_UPDATES:-2800}" 4000 40 --dropout 0.2 --lr 8e-4 \
    --save-interval-updates 200 --keep-interval-updates 6 --finetune-from-model $work/stage5/mean.pt
  finish $work/stage6
}

stage 'Stage 7: export'
mkdir -p $work/demo
export_mean $work/stage6 $work/demo/model.pt
cp $work/pieces/{dict.txt,sentencepiece.model} $work/pairs/test.{source,target} $work/demo

stage 'Stage 8: scores on the test set'
python scripts/demo.py --demo $work/demo --results-path $work/scores
