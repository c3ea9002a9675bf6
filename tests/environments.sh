# For scripts that run in the repository root: environments beside .venv, for packages that the project does not need.
# new_environment FOLDER; install FOLDER REQUIREMENT...; see_project FOLDER: it sees the packages of .venv as well.
new_environment() { .venv/bin/python -m venv --without-pip --clear "$1"; }
install() {
    environment=$1
    shift
    .venv/bin/python -m pip --disable-pip-version-check --python "$environment/bin/python" install --quiet "$@"
}
see_project() {
    .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > "$(ls -d "$1"/lib/python*/site-packages)/project.pth"
}
