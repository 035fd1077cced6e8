import numpy as np

from rsi.admission.duplicates import SHINGLE, TOKEN, Nearest, signature, similarity
from rsi.types import Task

WORDS = [f"w{i}" for i in range(400)]


def task(instruction: str, solution: str = "sort a > b", name: str = "a") -> Task:
    files = {"solution/solve.sh": solution.encode(), "tests/test.sh": name.encode()}
    return Task(f"sha256:{name}", "terminal", instruction, files)


def jaccard(a: str, b: str) -> float:
    def shingles(text: str) -> set[tuple[str, ...]]:
        tokens = TOKEN.findall(text.lower())
        return {tuple(tokens[i : i + SHINGLE]) for i in range(len(tokens) - SHINGLE + 1)}

    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def test_the_estimate_is_the_jaccard_similarity_within_four_standard_deviations() -> None:
    rng = np.random.default_rng(0)
    whole = " ".join(WORDS)
    for changed in (1, 10, 40, 120):
        words = list(WORDS)
        for i in rng.choice(len(words), changed, replace=False):
            words[i] = f"x{i}"
        other = " ".join(words)
        true = jaccard(whole, other)
        allowed = 4 * np.sqrt(true * (1 - true) / 256)
        assert abs(similarity(signature(whole), signature(other)) - true) <= allowed


def test_the_nearest_task_is_found_whatever_its_tests_say() -> None:
    nearest = Nearest(
        [task("Count the lines of a into b.", name="x"), task("Sort the file a into b, please.", name="y")]
    )
    assert nearest.find(task("sort  the file A into b, please.", name="z")) == ("sha256:y", 1.0)
    assert Nearest().find(task("Anything.")) == ("", 0.0)


def test_another_solution_to_the_same_instruction_is_less_similar() -> None:
    nearest = Nearest([task("Sort a into b.")])
    assert nearest.find(task("Sort a into b.", "python3 -c 'print(1)' | tee b", name="z"))[1] < 0.8


def test_a_text_of_one_word_has_a_signature() -> None:
    assert similarity(signature("yes"), signature("yes")) == 1.0 > similarity(signature("yes"), signature(""))
