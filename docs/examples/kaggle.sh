#!/bin/sh
# From a competition's train.csv to submission.csv: sh kaggle.sh FOLDER [OVERRIDE ...]
# FOLDER has train.csv (id,label), train/, test.csv (id), test/ and sample_submission.csv.
set -eu
folder=$1
shift
set -- data.root="$folder/train.csv" data.images="$folder/train" "$@"

effloop verify "$@" # every image decoded once

# Three networks that were trained on other images, the last layer of each trained on two thirds of these.
effloop -m experiment=probe data.folds=3 data.fold=0,1,2 run=kaggle "$@"

# What they say together, as the sample has it.
effloop predict outputs/multirun/kaggle "$folder/test.csv" data.images="$folder/test" tta=flip \
    like="$folder/sample_submission.csv" out=submission.csv
