// lane.c - a thread that makes progress on what a rank has under way while the rank computes.
//
// It sleeps while nothing is under way, and while the rank itself waits, which is progress enough;
// else it looks about every 0.4 ms, so that it takes little of a processor that it shares. What it
// finds wrong is the world's failure, which the rank's next call returns.
#include "comm/comm.h"

#include <signal.h>

struct dpl_lane {
    pthread_t thread;
    pthread_cond_t work;
    bool quits;
};

static void *run(void *arg) {
    dpl_world *world = arg;
    struct dpl_lane *lane = world->lane;
    pthread_mutex_lock(&world->lock);
    while (!lane->quits) {
        const uint32_t seen = world->waits ? 0 : world->ops->look(world);
        if (world->waits || !dpl_world_advance(world)) {
            pthread_cond_wait(&lane->work, &world->lock);
            continue;
        }
        pthread_mutex_unlock(&world->lock);
        world->ops->rest(world, seen, DPL_RESTS_LANE);
        pthread_mutex_lock(&world->lock);
    }
    pthread_mutex_unlock(&world->lock);
    return NULL;
}

void dpl_lane_wake(dpl_world *world) {
    pthread_cond_signal(&world->lane->work);
}

void dpl_lane_close(dpl_world *world) {
    struct dpl_lane *lane = world->lane;
    if (!lane) return;
    lane->quits = true;
    pthread_cond_signal(&lane->work);
    pthread_mutex_unlock(&world->lock);
    pthread_join(lane->thread, NULL);
    pthread_mutex_lock(&world->lock);
    pthread_cond_destroy(&lane->work);
    dpl_free(lane);
    world->lane = NULL;
}

static dpl_status open_lane(dpl_world *world) {
    struct dpl_lane *lane = dpl_alloc(sizeof *lane);
    DPL_EXPECT(lane, DPL_ENOMEM, "no memory for a lane");
    sigset_t all, before; // signals are for the program's own threads
    pthread_cond_init(&lane->work, NULL);
    world->lane = lane;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool failed = pthread_create(&lane->thread, NULL, run, world) != 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) (void)pthread_setname_np(lane->thread, "dropless-lane");
    if (!failed) return DPL_OK;
    world->lane = NULL;
    pthread_cond_destroy(&lane->work);
    dpl_free(lane);
    return dpl_fail(DPL_ENOMEM, "the system gives no thread for a lane");
}

dpl_status dpl_comm_set_lane_threads(dpl_comm *comm, int n_threads) {
    DPL_CHECK(n_threads == 0 || n_threads == 1, "lane_threads=%d, expected 0 or 1", n_threads);
    dpl_world *world = comm ? comm->world : NULL;
    if (!world || world->n_ranks == 1) return DPL_OK; // nothing is ever under way
    dpl_status status = DPL_OK;
    pthread_mutex_lock(&world->lock);
    if (n_threads == 0) dpl_lane_close(world);
    else if (world->no_lane && world->rank == 0)
        dpl_log("notice: lane_threads=1 has no effect: MPI gives less than MPI_THREAD_SERIALIZED");
    else if (!world->no_lane && !world->lane) status = open_lane(world);
    pthread_mutex_unlock(&world->lock);
    return status;
}
