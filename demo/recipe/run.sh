#!/usr/bin/env bash
# From Debian's package index to the demo's model; training takes about an hour and a quarter on 2 cores:
#
#     make install && demo/recipe/run.sh [INDEX]
#
# INDEX is a Translation-en file of Debian, as plain text. Without it, the one of Debian 12 is
# fetched with apt-get (no root needed), which works where apt knows Debian 12 as a source.
# Everything goes into build/recipe, the result into build/recipe/demo, laid out as demo/ is. A stage
# whose result is there already is skipped, and interrupted training goes on where it was saved.
# A trial that trains nothing of use in a few minutes:
#
#     STAGE4_UPDATES=20 STAGE5_UPDATES=20 demo/recipe/run.sh
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/../.."

recipe=demo/recipe
work=build/recipe
index=${1:-$work/Translation-en}
export PATH="$PWD/.venv/bin:$PATH" PYTHONWARNINGS=ignore
mkdir -p "$work"

stage() { printf '\n== %s\n' "$1"; }

# finished DIR: true when that stage's result is complete; finish DIR: it now is.
finished() { [[ -e $1/finished ]]; }
finish() { touch "$1/finished"; }

# Ask apt for the index, in directories of our own, and unpack it.
fetch_index() {
  local apt=(-o "Dir::State=$PWD/$work/apt" -o "Dir::Cache=$PWD/$work/apt" -o Acquire::Languages=en)
  mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial"
  apt-get "${apt[@]}" update
  local packed
  packed=$(apt-get "${apt[@]}" indextargets --format '$(FILENAME)' \
    'Created-By: Translations' 'Codename: bookworm' 'Component: main')
  if [[ -z $packed ]]; then
    echo "apt has no source for Debian 12 (bookworm): give the index as an argument" >&2
    exit 1
  fi
  /usr/lib/apt/apt-helper cat-file "$packed" >"$index.part"
  mv "$index.part" "$index"
}

# prepare NAME: the texts of that name in fairseq's binary format, one dictionary for both sides.
prepare() {
  local texts=$work/$1 out=$work/$1-bin
  finished "$out" && return
  rm -rf "$out" # of an interrupted run: fairseq-preprocess overwrites nothing
  fairseq-preprocess --source-lang source --target-lang target --joined-dictionary \
    --srcdict "$work/pieces/dict.txt" --trainpref "$texts/train" --validpref "$texts/valid" --destdir "$out"
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

stage 'Stage 1: pairs'
[[ -e $index ]] || fetch_index
finished $work/pairs || { python $recipe/pairs.py "$index" $work/pairs; finish $work/pairs; }

stage 'Stage 2: pieces'
finished $work/pieces || { python $recipe/pieces.py $work/pairs $work/pieces; finish $work/pieces; }

stage 'Stage 3: infilling'
finished $work/mixed || { python $recipe/infill.py $work/pieces $work/mixed; finish $work/mixed; }
prepare mixed

stage 'Stage 4: training on infilling and short sources'
finished $work/stage4 || {
  train $work/mixed-bin $work/stage4 "${STAGE4_UPDATES:-2200}" 3000 200
  finish $work/stage4
}

stage 'Stage 5: training on whole pairs'
prepare pieces
finished $work/stage5 || {
  updates=${STAGE5_UPDATES:-4000}
  train $work/pieces-bin $work/stage5 "$updates" 4000 40 --max-update $((updates / 2)) \
    --finetune-from-model $work/stage4/checkpoint_last.pt
  train $work/pieces-bin $work/stage5 "$updates" 4000 40 --dropout 0.2
  finish $work/stage5
}

stage 'Stage 6: export'
mkdir -p $work/demo
checkpoints=($work/stage5/checkpoint_[0-9]*.pt) # of the last 1,000 updates; a trial saves none
python $recipe/export.py $work/demo/model.pt "${checkpoints[@]:-$work/stage5/checkpoint_last.pt}"
cp $work/pieces/{dict.txt,sentencepiece.model} $work/pairs/test.{source,target} $work/demo

stage 'Stage 7: scores on the test set'
python scripts/demo.py --demo $work/demo --build $work/scores
